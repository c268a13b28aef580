"""The command line, as `lookahead` and `python -m lookahead`. Ctrl-C ends it with status 130, also while it loads."""

import atexit
import os
import sys
import threading


def run() -> None:
    """Run the command line."""
    try:
        from lookahead.cli.app import main

        main()
    except KeyboardInterrupt:  # modules were being imported
        print("interrupted: stopped before it was finished", file=sys.stderr)
        _end()
    except SystemExit as end:
        is_at_work = any(thread.daemon for thread in threading.enumerate())
        if isinstance(end.code, int) and (is_at_work or end.code in (129, 130, 143)):
            _end(end.code)
        raise


def _end(status: int = 130) -> None:
    """End the process with this status now, after what was registered for its end.

    To take the modules apart takes seconds on a busy machine. After an interrupt within code that is compiled from
    text, such as that of a named tuple, Python would end by a signal, and so it would when a thread of a server comes
    back from code outside of the interpreter.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # its reader is gone
            continue
    os._exit(status)


if __name__ == "__main__":
    run()
