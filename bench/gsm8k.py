"""`bench/real_tasks.py --task gsm8k`, by the name that its recorded commands have."""

from __future__ import annotations

from real_tasks import main

if __name__ == "__main__":
    main()
