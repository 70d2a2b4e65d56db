# shellcheck shell=bash
# Containers get the library through nvshare's CDI file, which names the files that nvshare has
# installed on the node. A kubelet before 1.28 cannot request CDI devices, so nvidia-runtime applies
# the CDI file instead of containerd. An image's own preloaded library is loaded too. If the image's
# list cannot be merged, an event gives the reason.

request="resources: {limits: {nvshare.com/gpu: 1}}"
if ! has_cdi; then
    request="env: [{name: TEST_CDI_FILE, value: /var/run/cdi/nvshare.json}]"
    node=/var/lib/nvshare-node
    # Sockets need short paths.
    ln -sfn /var/lib/kubelet/pods/*/volumes/kubernetes.io~empty-dir/control /run/control
    write_nvidia_cdi 1
    $node/nvsharectl --control /run/control/control.sock cdi generate --require-nvidia --output=/var/run/cdi/nvshare.json \
        --library=$node/libnvshare.so --preload-list=$node/ld.so.preload --hook=$node/nvsharectl >/logs/cdi 2>&1 ||
        fail "no CDI file: $(cat /logs/cdi)"
fi

cdi_pod() { # name, image, words of the program
    kubectl apply -f - <<POD >/dev/null
apiVersion: v1
kind: Pod
metadata:
  name: $1
spec:
  restartPolicy: Never
  $runtime
  containers:
    - name: main
      image: nvshare.test/$2:1
      command: $(command_of "$3")
      $request
      securityContext: {readOnlyRootFilesystem: true}
POD
}
for image in program preloads; do
    cdi_pod "by-cdi-$image" $image "mix --mem 64M --reps 1 --rounds 2"
    until_true "by-cdi-$image" eval "is by-cdi-$image Succeeded || is by-cdi-$image Failed"
    kubectl logs "by-cdi-$image" | grep -q '"ok":true' || fail "by-cdi-$image: $(kubectl logs "by-cdi-$image")"
done
cdi_pod both preloads "naps --seconds 600"
both() {
    local main
    main=$(pgrep -n cuda-program) && grep -q libown.so "/proc/$main/maps" && grep -q libnvshare.so "/proc/$main/maps"
}
until_true "both libraries in one program" both
cdi_pod link links "naps --seconds 600"
says_why() { kubectl get events -o jsonpath='{.items[*].message}' | grep -q "cannot merge the image's /etc/ld.so.preload .* it is a symbolic link"; }
until_true "the event that the README names" says_why
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null
has_cdi || rm /etc/cdi/nvidia.json /var/run/cdi/nvshare.json /run/control
