# shellcheck shell=bash
# The node's /etc is read-only and lacks the directories that nvshare mounts, as on Talos. An event
# says so, and with the component `read-only-etc` the node offers slots.

has_cdi || return 0

mkdir /images/etcless
cat >/images/etcless/kustomization.yaml <<'KUSTOMIZATION'
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../slots]
components: [../read-only-etc]
KUSTOMIZATION
mv /etc/cdi/nvidia.json /var/run/cdi/nvidia.json
rmdir /etc/cdi
mv /etc/containerd /run/containerd-settings
mount --bind /etc /etc
mount -o remount,bind,ro /etc
kubectl -n nvshare rollout restart daemonset/nvshare >/dev/null
until_true "the event that the README names" has_event 'MountVolume.SetUp failed for volume "cdi-static" .*read-only file system'
kubectl apply -k /images/etcless >/dev/null
kubectl -n nvshare rollout status daemonset/nvshare --timeout=180s >/dev/null || fail "the DaemonSet is not ready"
until_true "slots" slots_are 4
pod etcless "mix --mem 64M --reps 1 --rounds 2"
until_true "a pod to run" is etcless Succeeded
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null

umount /etc
mv /run/containerd-settings /etc/containerd
write_nvidia_cdi 1
rm /var/run/cdi/nvidia.json
kubectl apply -k /images/slots >/dev/null
kubectl -n nvshare rollout status daemonset/nvshare --timeout=180s >/dev/null || fail "the DaemonSet is not ready again"
until_true "slots" slots_are 4
