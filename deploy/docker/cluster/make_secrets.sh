#!/bin/sh
# Makes secrets/ with random passwords, and the servers' connection string with one of them.
# As root: the files are for users 999 (postgres) and 971 (bellwether) of the images alone.
set -eu
cd "$(dirname "$0")"
[ ! -e secrets ] || { echo "secrets/ is there already: it is left as it is" >&2; exit 1; }
umask 077
mkdir secrets
for name in postgres server replication; do
  od -An -N24 -tx1 /dev/urandom | tr -d ' \n' > "secrets/$name-password"
done
printf 'host=primary,standby port=5432 dbname=bellwether user=bellwether password=%s target_session_attrs=read-write\n' \
  "$(cat secrets/server-password)" > secrets/cluster-dsn
chmod 0711 secrets
if [ "$(id -u)" = 0 ]; then
  chown 999:999 secrets/*-password
  chown 971:971 secrets/cluster-dsn
else
  echo "run as root, or give secrets/*-password to user 999 and secrets/cluster-dsn to user 971" >&2
fi
