#!/bin/bash
# Runs the commands of docs/recipes verbatim, and compares the results with the pages. Stand-ins
# replace the servers and trainings. Units are started as JupyterHub's spawner starts them.
. "$(dirname "$0")/../lib.sh"

pages=$here/pages
rules=/etc/nvshare/nvshare.toml.d

# Prints the commands of a page: one of its blocks of sh, counted from 1.
block() { # page, number
    text=$(awk -v wanted="$2" '/^```sh$/ { at++; inside = at == wanted; next } /^```/ { inside = 0 } inside' "$pages/$1.md")
    [ -n "$text" ] || fail "$1.md has no commands $2"
    printf '%s\n' "$text"
}
# Runs a command in the user's home, on the simulated GPU.
of_user() { # command…
    (umask 0 && cd /home/$user && in_session "${gpu[@]}" USER=$user HOME=/home/$user "$@")
}
# root needs no sudo, and the system has none.
do_as_root() { # page, number
    block "$@" >/tmp/block
    bash -ec 'sudo() { "$@"; }; . /tmp/block' 2>&1 || fail "commands $2 of $1.md"
}
do_as_user() { # page, number
    block "$@" >/tmp/block
    of_user bash -e /tmp/block 2>&1 || fail "commands $2 of $1.md"
}
# Lines with sudo are run as root, and other lines as the user.
do_each() { # page, number
    block "$@" >/tmp/block
    while read -r line; do
        case $line in
        "sudo "*) eval "${line#sudo }" ;;
        *) of_user bash -ec "$line" ;;
        esac </dev/null 2>&1 || fail "$1.md: $line"
    done </tmp/block
}
# Checks that the page shows each line of the last output.
is_shown() { # page
    sed "s|/usr/lib/[^/]*-linux-gnu/|/usr/lib/x86_64-linux-gnu/|" /tmp/said | while read -r line; do
        [ -z "$line" ] || grep -qF -- "$line" "$pages/$1.md" || fail "$1.md does not show «$line»"
    done
}
has_rule() { is_so ".clients[] | select(.rule == \"$1\") | .gpus[] | .grants > 0"; }
is_empty() { is_so '.clients == []'; }

cp "$here"/recipes/*.py /home/$user
systemctl start "user@$(id -u $user).service"

# ---- a lab machine
for name in bob carol dave erin frank grace heidi; do useradd --system $name; done
do_as_root lab-machine 1 >/dev/null
do_as_root lab-machine 2 >/tmp/said
is_shown lab-machine
of_user python3 train.py --memory 96M --seconds 600 >/tmp/train 2>&1 &
until_true "a student's program to run" has_rule students
says "It holds GPU 0. Its turn has no time limit." do_as_user lab-machine 4
do_as_root lab-machine 5 >/tmp/said
grep -q 'may use 128 MiB by rule "students"' /tmp/said || fail "status: $(cat /tmp/said)"
refused CUDA_ERROR_OUT_OF_MEMORY of_user python3 train.py --memory 192M
do_as_root lab-machine 6 >/tmp/said
grep -q 'memory-max of rule "students"' /tmp/said || fail "the journal: $(cat /tmp/said)"
pkill -u $user python3
until_true "the program to be gone" is_empty
do_as_root lab-machine 7 >/tmp/said
grep -q "^$user " /tmp/said || fail "the report: $(cat /tmp/said)"
nvsharectl preload disable >/dev/null

# ---- notebooks
rm $rules/lab.toml
do_as_root notebooks 1 >/dev/null
settings=(LD_PRELOAD=libnvshare.so "${gpu[@]}")
systemd-run --quiet --unit=jupyter-$user-singleuser --uid=$user --working-directory=/home/$user --property=UMask=0 \
    "${settings[@]/#/--setenv=}" python3 train.py --memory 96M --seconds 600
until_true "a notebook to run" has_rule notebooks
says "It holds GPU 0. Its turn has no time limit." as_user nvsharectl why jupyter-$user-singleuser.service
nvsharectl | grep -q 'may use 128 MiB by rule "notebooks"' || fail "status: $(nvsharectl)"
do_as_root notebooks 2 >/tmp/said
grep -q '^  jupyter-' /tmp/said || fail "top: $(cat /tmp/said)"
systemctl stop jupyter-$user-singleuser
until_true "the notebook to be gone" is_empty
do_as_root notebooks 3 >/tmp/said
grep -q "^$user " /tmp/said || fail "the report: $(cat /tmp/said)"

# ---- the rules of the others
rm $rules/notebooks.toml
do_as_root slurm 2 >/dev/null
do_as_root compose 2 >/dev/null
nvsharectl get | grep -c '^name = ' | grep -qx 2 || fail "the rules: $(nvsharectl get)"
rm -r $rules
nvsharectl reload

# ---- servers
printf 'polkit.addRule(function(action, subject) {\n    if (subject.user == "%s")\n        return polkit.Result.YES;\n});\n' $user \
    >/etc/polkit-1/rules.d/10-test.rules
chmod 644 /etc/polkit-1/rules.d/10-test.rules
mkdir -p /home/$user/.config/systemd/user
service() { # command: a service that needs most of the GPU
    printf '[Service]\nUMask=0\nWorkingDirectory=/home/%s\nExecStart=python3 server.py --memory 160M --port %s\n' $user "$1"
    printf 'Environment=%s\n' "${gpu[*]}"
}
service 8001 >/etc/systemd/system/llm.service
service 8188 >/home/$user/.config/systemd/user/comfyui.service
chown -R $user: /home/$user/.config
systemctl daemon-reload
in_session systemctl --user daemon-reload
do_each servers 1 >/tmp/said
is_shown servers
answers() { python3 -c "import urllib.request as r; print(r.urlopen('http://127.0.0.1:$1').read().decode())"; }
for port in 8001 8188 8001 8188; do until_true "port $port to answer" answers $port; done
do_each servers 2 >/tmp/said
for what in "adopted llm.service" "adopted comfyui.service of $(id -u $user)"; do
    grep -q "interactive by rule \"$what\"" /tmp/said || fail "status: $(cat /tmp/said)"
done
do_each servers 3 >/tmp/said
grep -q '^It ' /tmp/said || fail "why: $(cat /tmp/said)"
do_each servers 4 >/dev/null
nvsharectl get | grep -qx 'memory-low = "50%"' || fail "the changed rule: $(nvsharectl get)"
do_each servers 5 >/tmp/said
is_shown servers
says "" sh -c 'nvsharectl get | grep adopted || true'
until_true "both to be without nvshare" is_empty
systemctl stop llm
in_session systemctl --user stop comfyui

systemctl stop "user@$(id -u $user).service" "user-runtime-dir@$(id -u $user).service"
for name in bob carol dave erin frank grace heidi; do userdel $name; done
groupdel students
rm -rf /home/$user/*.py /home/$user/__pycache__ /home/$user/.config /etc/systemd/system/llm.service /etc/systemd/system/llm.service.d \
    /etc/polkit-1/rules.d/10-test.rules
systemctl daemon-reload
nvsharectl reset
