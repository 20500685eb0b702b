"""Settings of S3 from the usual places: the environment, then the files under ~/.aws.

Owns which variables and keys count. The environment goes first; a profile's static keys and region
are read from the shared files when the environment has no keys. Everything else, such as the role
of a machine, is left to the library. No secret is ever printed.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from shardb.errors import UsageError
from shardb.filesystem import FileSystem, RealFileSystem, read_file

FILE_LIMIT_BYTES = 1 << 20
DEFAULT_REGION = "us-east-1"
# Where the library finds keys by itself; then the shared file is not asked.
OTHER_SOURCES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}


def s3_settings(environment: Mapping[str, str], files: FileSystem | None = None) -> dict[str, str]:
    """Keyword arguments for the library: endpoint, region, keys. UsageError for a bad endpoint."""
    files = files or RealFileSystem()
    profile = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
    settings: dict[str, str] = {}
    endpoint = next((environment[name] for name in ENDPOINTS if environment.get(name)), None)
    if endpoint is not None:
        settings["endpoint"] = _checked_endpoint(endpoint)
    config = _section(files, environment, "AWS_CONFIG_FILE", "config", _config_section(profile))
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    settings["region"] = region or config.get("region") or DEFAULT_REGION
    has_keys = environment.get("AWS_ACCESS_KEY_ID") or environment.get("AWS_SECRET_ACCESS_KEY")
    if not has_keys and not any(environment.get(name) for name in OTHER_SOURCES):
        shared = "AWS_SHARED_CREDENTIALS_FILE"
        found = {**config, **_section(files, environment, shared, "credentials", profile)}
        settings |= {ours: found[theirs] for theirs, ours in KEYS.items() if found.get(theirs)}
        if "AWS_PROFILE" in environment and "access_key_id" not in settings:
            raise UsageError(
                f"AWS_PROFILE is {profile!r}, but no profile of that name with static keys is in "
                "~/.aws/credentials; correct it, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
    return settings


def _checked_endpoint(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"the endpoint {endpoint!r} is no URL; give one like https://host:port in "
            f"{ENDPOINTS[1]}"
        )
    return endpoint.rstrip("/")


def _config_section(profile: str) -> str:
    return profile if profile == "default" else f"profile {profile}"


def _section(
    files: FileSystem, environment: Mapping[str, str], variable: str, name: str, section: str
) -> dict[str, str]:
    """One section of a shared file; empty where there is no such file or section."""
    path = environment.get(variable) or os.path.expanduser(f"~/.aws/{name}")
    try:
        text = read_file(files, path, limit_bytes=FILE_LIMIT_BYTES).decode()
        parser = configparser.RawConfigParser()
        parser.read_string(text)
    except OSError:
        return {}
    except (configparser.Error, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: this is no configuration file: {type(error).__name__}"
        ) from error
    return dict(parser[section]) if parser.has_section(section) else {}
