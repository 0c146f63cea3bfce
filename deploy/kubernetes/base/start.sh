#!/bin/sh
# Starts Redis with the password in a file: it stands in no process list.
set -eu
umask 077
{
  cat /etc/breadbox/redis.conf
  printf 'maxmemory %s\n' "${REDIS_MAXMEMORY:?}"
  printf 'requirepass "%s"\n' "${REDIS_PASSWORD:?}"
} >/run/breadbox/redis.conf
unset REDIS_PASSWORD
exec redis-server /run/breadbox/redis.conf
