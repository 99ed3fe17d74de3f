"""`python -m tlt_lightning fit|validate|predict -c recipe.yaml` and `python -m tlt_lightning export`."""

from tlt_lightning.cli import main

if __name__ == "__main__":
    main()
