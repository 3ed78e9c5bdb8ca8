"""``python -m openclaw_nb.engine`` runs one worker."""

from openclaw_nb.engine.process import main

if __name__ == "__main__":
    main()
