#!/bin/sh
# Starts Redis with the users that `breadbox secrets` made; it holds hashes of their passwords.
set -eu
umask 077
{
  cat /etc/breadbox/redis.conf
  printf 'maxmemory %s\n' "${REDIS_MAXMEMORY:?}"
  printf 'aclfile /secrets/redis/users.acl\n'
} >/run/breadbox/redis.conf
exec redis-server /run/breadbox/redis.conf
