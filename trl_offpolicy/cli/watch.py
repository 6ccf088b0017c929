"""The command ``trl-offpolicy watch``: the report of a run that trains, in a browser."""

from __future__ import annotations

import argparse
from collections.abc import Callable

PORT, EVERY = 8765, 10


def watch(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Serve a run's report while it trains, on this machine only; the page renews itself."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("--port", type=int, default=PORT, help="port on 127.0.0.1; 0 takes a free one (%(default)s)")
    parser.add_argument("--every", type=int, default=EVERY, metavar="SECONDS", help="between two looks (%(default)s)")
    parser.add_argument("--tokenizer", metavar="NAME", help="tokenizer (name or folder) that turns token ids into text")

    def run(args: argparse.Namespace) -> int:
        if args.every < 1:
            raise ValueError(f"--every must be at least 1, but got {args.every}.")
        from trl_offpolicy.cli.tokenizers import load_decode
        from trl_offpolicy.diagnosis.report.watch import HOST, LivePage, report_server

        page = LivePage(args.run_dir, every=args.every, decode=load_decode(args.tokenizer))
        with report_server(page, args.port) as server:
            print(f"http://{HOST}:{server.server_port}/  shows {args.run_dir}; Ctrl-C ends it", flush=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                print()
        return 0

    return run
