#!/bin/sh
# What docker-compose.yml's service `secrets` does: `make` makes what is secret and not there yet;
# `env`, `env ha` and `grafana` print what a person on this host needs of it.
set -eu
case "$1" in
  make)
    breadbox secrets /secrets --redis redis:6379
    ;;
  env)
    # `env ha`: of both servers, with commas.
    standby=${2:+,127.0.0.1:$BREADBOX_STANDBY_PORT}
    printf 'export BREADBOX_SERVER=127.0.0.1:%s%s\n' "$BREADBOX_PORT" "$standby"
    printf 'export BREADBOX_TOKEN=%s\n' "$(cat /secrets/admin/token)"
    printf 'export BREADBOX_STORE_URL=%s\n' \
      "$(sed "s|@redis:6379/|@127.0.0.1:$BREADBOX_REDIS_PORT/|" /secrets/admin/store)"
    printf '# For the login of the console: %s\n' "$(cat /secrets/viewer/token)"
    ;;
  grafana)
    printf 'user admin, password %s\n' "$(cat /secrets/dashboards/password)"
    ;;
  *)
    echo "secrets.sh: make, env or grafana, not '$1'" >&2
    exit 2
    ;;
esac
