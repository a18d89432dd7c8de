"""`python -m posenc.bench.accelerated` under the name that a request to the GPU still has; to be deleted after it."""

from ..bench.accelerated import main

if __name__ == "__main__":
    main()
