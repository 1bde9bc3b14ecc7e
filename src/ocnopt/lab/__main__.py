"""``python -m ocnopt.lab`` is ``ocnopt``; ``torchrun`` needs a module to start."""

from ocnopt.lab.cli import main

if __name__ == "__main__":
    main()
