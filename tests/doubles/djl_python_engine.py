"""The program of DJL's worker, as djl_python_engine.py of 0.28, with the stand-in for djl_python.

python -m tests.doubles.djl_python_engine --version 0.28.0 --sock-name PATH --model-dir DIRECTORY
"""

from __future__ import annotations

import argparse
import importlib
import socket
import sys

from tests.doubles.djl_python import Input, Output, stand_in

STARTED = "Python engine started."
"""The line that Java waits for."""


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--version", "--sock-name", "--model-dir"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    sys.modules["djl_python"] = stand_in(arguments.version)
    service = importlib.import_module("handler.entry")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(arguments.sock_name)
        listener.listen()
        print(STARTED, flush=True)
        connection, _ = listener.accept()
    while True:
        inputs = Input()
        inputs.read(connection)
        inputs.properties |= {"device_id": "-1", "model_dir": arguments.model_dir}
        answer: Output = getattr(service, inputs.function_name or "handle")(inputs)
        answer.send(connection)


if __name__ == "__main__":
    main()
