"""`python -m dspark`: the console script, for launchers that start modules."""

from dspark.cli.main import main

if __name__ == "__main__":
    main()
