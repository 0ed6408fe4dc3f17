"""The attack campaign: kills, damaged files and hostile requests, as a program. Run it with `python scripts/attack`."""
