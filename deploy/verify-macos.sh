#!/bin/bash
# What could not be tried on Linux, tried on a Mac. Prints one line for each point: held, FAILED or
# skipped, and ends with 1 if one failed. Installs and removes the service of this user; do not run it
# where prefixcached is in use.
#
#   deploy/verify-macos.sh [path of prefixcached]
set -u

command=${1:-$(command -v prefixcached)}
label=org.prefixcached.daemon
support="$HOME/Library/Application Support/prefixcached"
socket="$support/prefixcached.sock"
agent="$HOME/Library/LaunchAgents/$label.plist"
failures=0

held()    { printf 'held     %s\n' "$1"; }
failed()  { printf 'FAILED   %s\n' "$1"; failures=$((failures + 1)); }
skipped() { printf 'skipped  %s\n' "$1"; }
check()   { local what=$1; shift; if "$@" >/dev/null 2>&1; then held "$what"; else failed "$what"; fi; }

[ "$(uname)" = Darwin ] || { echo 'this script is for macOS' >&2; exit 2; }
[ -x "$command" ] || { echo 'prefixcached is not on PATH; name it as the argument' >&2; exit 2; }
if [ -e "$agent" ] || "$command" status --socket "$socket" >/dev/null 2>&1; then
  echo 'prefixcached is in use here; stop it and uninstall its service first' >&2
  exit 2
fi
sw_vers

domain=gui/$UID
/bin/launchctl print "$domain" >/dev/null 2>&1 || domain=user/$UID
mode()   { stat -f %Lp "$1"; }
daemon() { "$command" status --json --socket "$socket"; }
pid_of() { daemon | sed -n 's/.*"pid": \([0-9]*\).*/\1/p' | head -n 1; }

check 'service install, verified by connecting' "$command" service install
check 'the property list is valid' plutil -lint "$agent"
[ "$(mode "$socket")" = 600 ] && held 'launchd gives the socket mode 0600' \
  || failed "launchd gives the socket mode $(mode "$socket"), not 600"
[ "$(mode "$support")" = 700 ] && held 'the socket lies in a 0700 directory' \
  || failed 'the directory of the socket is not 0700'

# launchctl's text is no interface; it is read here by a person's script alone.
text=$(/bin/launchctl print "$domain/$label" 2>/dev/null)
case $text in
  *'exit timeout = 30'*) held 'the exit time-out of 30 s is accepted' ;;
  *) failed "the exit time-out is: $(printf '%s' "$text" | grep 'exit timeout')" ;;
esac
check 'doctor finds nothing broken' "$command" doctor

log="$HOME/Library/Logs/prefixcached/prefixcached.log"
check 'the daemon logs JSON lines to its own file' grep -q '"event": "ready"' "$log"

pid=$(pid_of)
kill -9 "$pid" 2>/dev/null
check 'the socket survives kill -9, and a connection starts the daemon again' \
  "$command" service start
[ "$(pid_of)" != "$pid" ] && held 'it is another process' || failed 'it is the same process'

started=$(date +%s)
check 'service restart is graceful' "$command" service restart
[ $(($(date +%s) - started)) -lt 25 ] && held 'and takes less than 25 s' || failed 'and takes too long'
check 'service install again' "$command" service install

pressure=$(sysctl -n kern.memorystatus_vm_pressure_level 2>/dev/null)
case $pressure in
  1|2|4) held "the memory pressure level is readable ($pressure)" ;;
  *) failed 'kern.memorystatus_vm_pressure_level is not readable' ;;
esac
python=$(head -n 1 "$command" | sed -n 's/^#!//p')
if [ -x "$python" ]; then
  check 'kqueue gives memory pressure events to Python' "$python" - <<'PYTHON'
import select
queue = select.kqueue()
queue.control([select.kevent(0, -14, select.KQ_EV_ADD | select.KQ_EV_CLEAR, 0x7)], 0)
PYTHON
  check 'shared memory: one object, a read-only descriptor that cannot be mapped writable' \
    "$python" - <<'PYTHON'
import mmap
from prefixcached.actors import memory
image = memory.create(1 << 20)
image.write_at(0, [b"x" * (1 << 20)])
image.seal()
assert mmap.mmap(image.descriptor, 1 << 20, prot=mmap.PROT_READ)[:1] == b"x"
try:
    mmap.mmap(image.descriptor, 1 << 20, prot=mmap.PROT_READ | mmap.PROT_WRITE)
except PermissionError:
    pass
else:
    raise SystemExit("it can be mapped writable")
image.free()
PYTHON
else
  skipped 'checks inside Python: the script names no interpreter'
fi

"$command" service stop >/dev/null 2>&1
if PREFIXCACHED_START=1 "$python" -c \
  'from prefixcached.client import connect; connect(fail_open=False).stats()' 2>/dev/null
then failed 'a client started a daemon beside the stopped service'
else held 'a client leaves a stopped service stopped'
fi
"$command" service start >/dev/null 2>&1

state="$HOME/Library/Caches/prefixcached"
if [ -d "$state" ]; then
  case $(tmutil isexcluded "$state/segments.noindex" 2>/dev/null) in
    *Excluded*) held 'Time Machine leaves the cache out' ;;
    *) failed 'Time Machine includes the cache' ;;
  esac
  [ -z "$(mdfind -onlyin "$state" 'kMDItemFSName == "*.safetensors"' 2>/dev/null)" ] \
    && held 'Spotlight leaves the cache out' || failed 'Spotlight indexes the cache'
else
  skipped 'Time Machine and Spotlight: the cache directory is not there'
fi

check 'service uninstall --purge' "$command" service uninstall --purge
for path in "$agent" "$support" "$state" "$HOME/Library/Logs/prefixcached"; do
  [ ! -e "$path" ] && held "nothing is left at $path" || failed "something is left at $path"
done

if pid=$(PREFIXCACHED_START=1 "$python" -c \
  'from prefixcached.client import connect
print(connect(timeout=20, fail_open=False).stats()["daemon"]["pid"])' 2>/dev/null)
then
  held 'a client starts the daemon where no service is installed'
  check 'and it outlives that client' kill "$pid"
  for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$pid" 2>/dev/null || break; sleep 1; done
  "$command" service uninstall --purge >/dev/null 2>&1
else failed 'a client does not start the daemon'
fi
exit $((failures > 0))
