"""Stands where DJL Serving 0.28 looks for its conversion of TensorRT-LLM models."""

from handler.djl.partition import main

raise SystemExit(main())
