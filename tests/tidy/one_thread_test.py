"""Goal: tests that ThreadSanitizer is spared, as they start no thread, start none.
Method: the symbols that their programs import; a test that does start threads must be found out.

    one_thread_test.py PROGRAM_WITH_THREADS PROGRAM...
"""

from __future__ import annotations

import subprocess
import sys


def starts_threads(program: str) -> bool:
    symbols = subprocess.run(["nm", "-D", program], capture_output=True, text=True, check=True).stdout
    return "pthread_create" in symbols or "_M_start_thread" in symbols


def main() -> int:
    with_threads, *programs = sys.argv[1:]
    assert starts_threads(with_threads), f"{with_threads} starts threads, which was not seen"
    assert programs, "no program was given"
    wrong = [program for program in programs if starts_threads(program)]
    if wrong:
        print("these start threads, so they must not be marked ONE_THREAD:", *wrong, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
