"""An S3-compatible server of one's own (moto), over a real socket."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.common.servers import free_port


@contextmanager
def s3_server() -> Iterator[int]:
    """The port of a server in a process of its own, with a bucket ``bucket``."""
    port = free_port()
    serve = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    process = subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        import boto3

        client = boto3.client(
            "s3",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
            endpoint_url=f"http://127.0.0.1:{port}",
        )
        for attempt in range(60):
            try:
                client.create_bucket(Bucket="bucket")
                break
            except Exception:
                if attempt == 59:
                    raise
                time.sleep(0.5)
        client.close()
        yield port
    finally:
        process.kill()
        process.wait()


def s3_environment(port: int) -> dict[str, str]:
    """What makes obstore find that server."""
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
    }
