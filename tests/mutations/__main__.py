import sys

from tests.mutations import MUTATIONS, check

if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]] or range(1, len(MUTATIONS) + 1)
    sys.exit(not check(numbers))
