"""Entry point of `python -m handler.container`, the ENTRYPOINT of every image."""

from handler.container.start import main

if __name__ == "__main__":
    raise SystemExit(main())
