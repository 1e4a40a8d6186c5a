"""Networks of other people, small, built by name: what ``scripts/model_zoo.py`` converts."""
