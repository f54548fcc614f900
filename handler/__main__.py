"""Entry point of `python -m handler`, which is the command `lmi`."""

from handler.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
