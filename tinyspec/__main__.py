"""`python -m tinyspec` is `tinyspec`."""

from tinyspec.cli import main

if __name__ == "__main__":
    main(prog_name="tinyspec")
