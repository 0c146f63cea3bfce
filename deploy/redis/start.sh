#!/bin/sh
# Starts Redis as user `redis`, with the users that `breadbox secrets` made; it holds their hashes.
set -eu
umask 077
mkdir -p /run/breadbox
cp /secrets/redis/users.acl /run/breadbox/users.acl
{
  cat /etc/breadbox/redis.conf
  printf 'maxmemory %s\n' "${REDIS_MAXMEMORY:-2gb}"
  printf 'aclfile /run/breadbox/users.acl\n'
} >/run/breadbox/redis.conf
chown -R redis:redis /run/breadbox /data
exec setpriv --reuid=redis --regid=redis --init-groups redis-server /run/breadbox/redis.conf
