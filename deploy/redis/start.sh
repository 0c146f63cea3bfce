#!/bin/sh
# Starts Redis as user `redis`, with the password in a file that only it reads: neither the process
# list nor `docker inspect` of the command shows it.
set -eu
: "${REDIS_PASSWORD:?set BREADBOX_REDIS_PASSWORD}"
umask 077
mkdir -p /run/breadbox
{
  cat /etc/breadbox/redis.conf
  printf 'maxmemory %s\n' "${REDIS_MAXMEMORY:-2gb}"
  printf 'requirepass "%s"\n' "$REDIS_PASSWORD"
} >/run/breadbox/redis.conf
chown -R redis:redis /run/breadbox /data
unset REDIS_PASSWORD
exec setpriv --reuid=redis --regid=redis --init-groups redis-server /run/breadbox/redis.conf
