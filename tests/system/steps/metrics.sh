#!/bin/bash
# Metrics are on no socket until an administrator enables one. This step adds a TCP port to the unit
# of the socket, enables the unit, and disables it again.
. "$(dirname "$0")/../lib.sh"

unit_of_metrics=nvshare-metrics.socket
[ "$(systemctl is-enabled $unit_of_metrics)" = disabled ] || fail "metrics are enabled by themselves"
[ ! -e /run/nvshare-metrics/metrics.sock ] || fail "metrics are served without having been asked for"

mkdir -p /etc/systemd/system/$unit_of_metrics.d
printf '[Socket]\nListenStream=127.0.0.1:9810\n' >/etc/systemd/system/$unit_of_metrics.d/tcp.conf
systemctl daemon-reload
systemctl enable --quiet $unit_of_metrics
systemctl restart $unit
says "root nvshare 660" stat -c '%U %G %a' /run/nvshare-metrics/metrics.sock

scrape() {
    exec 3<>/dev/tcp/127.0.0.1/9810
    printf 'GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n' >&3
    cat <&3
    exec 3>&-
}
until_true "metrics over TCP" eval 'scrape | grep -q "^# EOF"'
scrape | grep -q '^nvshare_gpu_total_bytes{' || fail "no GPU in the metrics: $(scrape)"

systemctl disable --quiet --now $unit_of_metrics
rm -r /etc/systemd/system/$unit_of_metrics.d
systemctl daemon-reload
systemctl restart $unit
[ ! -e /run/nvshare-metrics/metrics.sock ] || fail "metrics are served still"
