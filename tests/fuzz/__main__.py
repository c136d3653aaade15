"""`make fuzz`: try thousands of damaged inputs."""

import sys

from tests.fuzz.workers import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
