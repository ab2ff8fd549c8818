"""`fairshare`, but it looks at its engines eight times as often, and not as long: for tests of what it sees there."""

from fairshare.cli import main
from fairshare.gateway import engine_http, instances

instances.CHECK_SECONDS = 0.125
engine_http.KEPT_SECONDS = 1.0

if __name__ == "__main__":
    main()
