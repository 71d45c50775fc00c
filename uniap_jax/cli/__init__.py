"""The command line: `uniap-jax doctor|trace|profile|plan|explain|check|solve|run|demo`.

Nothing here imports jax before `--devices` has been read: the number of virtual devices and the size of the CPU
client's thread pool are fixed when jax starts. Standard output carries what was asked for and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from uniap_jax.cli.environment import set_environment
from uniap_jax.cli.options import parse
from uniap_jax.cli.output import claim_stdout, failure, start_logging
from uniap_jax.core.errors import UniapError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one verb and leaves the process with its exit code.

    Exit codes: 0 ok; 1 a step or a solver broke; 2 wrong use or a step that cannot be read; 3 nothing fits, or the
    given plan cannot be made for this model and these devices; 4 no plan in time; 5 the check failed.
    """
    options = parse(sys.argv[1:] if argv is None else argv)
    output = claim_stdout(as_json=options.json)
    start_logging(verbose=options.verbose)
    try:
        set_environment(options.devices, absent=bool(vars(options).get("topology")))
        code = options.verb(options, output)
    except UniapError as error:
        code = failure(error, output)
    output.close()
    sys.exit(code)
