"""`python -m cyber0` is the command line."""

from cyber0.cli.main import main

if __name__ == "__main__":
    main()
