"""`python -m handler` is `lmi`."""

from handler.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
