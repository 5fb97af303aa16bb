"""The servers that tests of backends talk to."""

from tests.servers.s3_fixtures import aws_environment, moto, s3_url, seaweed

__all__ = ["aws_environment", "moto", "s3_url", "seaweed"]
