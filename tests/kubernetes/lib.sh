# shellcheck shell=bash
# Functions that the steps share. inside.sh sources this file.

export PATH=/opt/kubernetes:$PATH:/opt/tools KUBECONFIG=/etc/kubernetes/admin.conf
address=10.96.0.1
began=$SECONDS
declare -A daemons

# The minor version of Kubernetes 1.
minor=$(kubelet --version | sed 's/.*v1\.\([0-9]*\).*/\1/')
has_cdi() { [ "$minor" -ge 28 ]; }
has_claims() { [ "$minor" -ge 34 ]; }
# The gates that the README names.
gates=()
case $minor in 34 | 35) gates=(--feature-gates=DRAConsumableCapacity=true,DRADeviceTaints=true) ;; esac

say() { printf '%4d s  %s\n' $((SECONDS - began)) "$*"; }

fail() {
    echo "FAILED: $*" >&2
    {
        kubectl get nodes,pods --all-namespaces -o wide
        ! declare -F ctl >/dev/null || ctl status
        kubectl get events --all-namespaces --sort-by=.lastTimestamp | tail -n 20
        for container in prepare checkpoint scheduler cdi device-plugin agent; do
            echo "--- log of $container"
            kubectl -n nvshare logs daemonset/nvshare -c $container --tail=20
        done
        echo "--- log of the kubelet"
        grep -v ' I[0-9]' /logs/kubelet | tail -n 10 | cut -c 1-300
    } >&2 2>&1 || true
    exit 1
}

finish() {
    code=$?
    trap - EXIT
    # The namespaces, and all processes in them, end when this process ends.
    exit $code
}

until_true() { # what, command…
    local what=$1 deadline=$((SECONDS + ${PATIENCE:-120}))
    shift
    while [ $SECONDS -lt $deadline ]; do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.2
    done
    fail "waited in vain for $what"
}

# ---- daemons

start() { # name, command…
    local name=$1
    shift
    "$@" >>"/logs/$name" 2>&1 &
    daemons[$name]=$!
}

stop() { # name
    kill "${daemons[$1]}"
    wait "${daemons[$1]}" 2>/dev/null || true
}

start_etcd() {
    start etcd etcd --data-dir=/var/lib/etcd --unsafe-no-fsync --listen-client-urls=http://127.0.0.1:2379 \
        --advertise-client-urls=http://127.0.0.1:2379 --listen-peer-urls=http://127.0.0.1:2380
}

start_api_server() {
    start kube-apiserver kube-apiserver "${gates[@]}" --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --secure-port=443 \
        --advertise-address=$address --service-cluster-ip-range=10.96.0.0/24 --authorization-mode=Node,RBAC --allow-privileged \
        --token-auth-file=/etc/kubernetes/tokens --tls-cert-file=/etc/kubernetes/server.crt \
        --tls-private-key-file=/etc/kubernetes/server.key --service-account-issuer=https://kubernetes.default.svc \
        --service-account-signing-key-file=/etc/kubernetes/server.key --service-account-key-file=/etc/kubernetes/server.key \
        --kubelet-certificate-authority=/etc/kubernetes/ca.crt \
        --kubelet-client-certificate=/etc/kubernetes/client.crt --kubelet-client-key=/etc/kubernetes/client.key \
        --kubelet-preferred-address-types=InternalIP \
        --enable-admission-plugins=NodeRestriction
}

start_controllers() {
    start kube-controller-manager kube-controller-manager --kubeconfig=$KUBECONFIG --leader-elect=false \
        --use-service-account-credentials --root-ca-file=/etc/kubernetes/ca.crt \
        --service-account-private-key-file=/etc/kubernetes/server.key "${gates[@]}"
    start kube-scheduler kube-scheduler "${gates[@]}" --kubeconfig=$KUBECONFIG --leader-elect=false
}

start_containerd() {
    start containerd containerd
    until_true "containerd" ctr version
}

start_kubelet() {
    local endpoint=()
    has_cdi || endpoint=(--container-runtime=remote --container-runtime-endpoint=unix:///run/containerd/containerd.sock)
    start kubelet kubelet --config=/etc/kubernetes/kubelet.yaml --kubeconfig=/etc/kubernetes/kubelet.conf \
        "${endpoint[@]}" "${gates[@]}" --hostname-override=node --node-ip=$address --node-labels=nvidia.com/gpu.present=true
}

# Starts the second node: containerd and a kubelet in their own mount and PID namespaces. Both nodes
# have one network.
start_second_node() {
    local file
    cp -r /etc/kubernetes /etc/containerd /etc/cni /etc/cdi /second/etc/
    cp /etc/kubernetes/second.conf /second/etc/kubernetes/kubelet.conf
    for file in crt key; do cp "/etc/kubernetes/second.$file" "/second/etc/kubernetes/kubelet.$file"; done
    printf 'port: 10350\nhealthzPort: 10348\ncgroupRoot: /second\n' >>/second/etc/kubernetes/kubelet.yaml
    sed -i 's/"bridge": "pods"/"bridge": "second"/; s/10\.244\.0\.0/10.244.1.0/' /second/etc/cni/net.d/10-bridge.conflist
    for file in /sys/fs/cgroup/*/; do
        [ ! -e "$file/cgroup.procs" ] || mkdir -p "$file/second"
    done
    for file in cpuset.cpus cpuset.mems; do cat "/sys/fs/cgroup/cpuset/$file" >"/sys/fs/cgroup/cpuset/second/$file"; done
    start second unshare --mount --propagation private --pid --fork --kill-child --uts /steps/second.sh
    until_true "the second node" kubectl wait --for=condition=Ready node/second --timeout=1s
}

# Runs a command in the second node.
on_second() {
    nsenter --target "$(pgrep -P "${daemons[second]}")" --mount --pid "$@"
}

node_is_ready() {
    kubectl wait --for=condition=Ready node/node --timeout=1s
}

certificate() { # name, subject, extension
    openssl req -newkey rsa:2048 -nodes -keyout "/etc/kubernetes/$1.key" -subj "$2" -out "/tmp/$1.csr" 2>/dev/null
    openssl x509 -req -in "/tmp/$1.csr" -CA /etc/kubernetes/ca.crt -CAkey /etc/kubernetes/ca.key -CAcreateserial -days 2 \
        -extfile <(printf '%s' "$3") -out "/etc/kubernetes/$1.crt" 2>/dev/null
}

kubeconfig() { # name, token
    local file=/etc/kubernetes/$1.conf
    kubectl config --kubeconfig="$file" set-cluster node --server=https://$address --certificate-authority=/etc/kubernetes/ca.crt
    kubectl config --kubeconfig="$file" set-credentials "$1" --token="$2"
    kubectl config --kubeconfig="$file" set-context node --cluster=node --user="$1"
    kubectl config --kubeconfig="$file" use-context node
}

configure_node() {
    mkdir -p /etc/kubernetes /etc/containerd /etc/cni/net.d
    openssl req -x509 -newkey rsa:2048 -nodes -keyout /etc/kubernetes/ca.key -out /etc/kubernetes/ca.crt -days 2 \
        -subj /CN=ca 2>/dev/null
    certificate server /CN=server "subjectAltName=IP:$address,IP:127.0.0.1,DNS:kubernetes.default.svc"
    certificate kubelet /CN=node "subjectAltName=IP:$address,DNS:node"
    certificate second /CN=second "subjectAltName=IP:10.96.0.2,DNS:second"
    certificate client /O=system:masters/CN=api-server "extendedKeyUsage=clientAuth"
    cat >/etc/kubernetes/tokens <<'TOKENS'
admin-token,admin,admin,system:masters
kubelet-token,system:node:node,kubelet,system:nodes
second-token,system:node:second,second,system:nodes
TOKENS
    { kubeconfig admin admin-token; kubeconfig kubelet kubelet-token; kubeconfig second second-token; } >/dev/null
    cat >/etc/kubernetes/kubelet.yaml <<'KUBELET'
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
tlsCertFile: /etc/kubernetes/kubelet.crt
tlsPrivateKeyFile: /etc/kubernetes/kubelet.key
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: /etc/kubernetes/ca.crt}}
authorization: {mode: Webhook}
cgroupDriver: cgroupfs
failSwapOn: false
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
evictionHard: {nodefs.available: "0%", imagefs.available: "0%"}
imageGCHighThresholdPercent: 100
KUBELET
    ! has_cdi || echo 'containerRuntimeEndpoint: unix:///run/containerd/containerd.sock' >>/etc/kubernetes/kubelet.yaml
    [ "$minor" -lt 31 ] || echo 'failCgroupV1: false' >>/etc/kubernetes/kubelet.yaml
    local plugins=/usr/lib/cni
    [ ! -e /opt/kubernetes/bridge ] || plugins=/opt/kubernetes
    cat >/etc/containerd/config.toml <<CONTAINERD
version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "nvshare.test/pause:1"
enable_cdi = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "$plugins"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
BinaryName = "/steps/nvidia-runtime"
CONTAINERD
    cat >/etc/cni/net.d/10-bridge.conflist <<'CNI'
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods", "isGateway": true,
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
CNI
}

# Writes NVIDIA's CDI file, for simulated GPUs.
write_nvidia_cdi() { # number of GPUs
    mkdir -p /etc/cdi
    jq --argjson gpus "$1" '{cdiVersion: "0.5.0", kind: "nvidia.com/gpu",
        devices: [range($gpus) | {name: tostring, containerEdits: {deviceNodes: [{path: "/dev/zero"}]}}],
        containerEdits: {env: .env, mounts: [.mounts[] | {hostPath: .source, containerPath: .destination, options}]}}' \
        /opt/gpu/edits.json >/etc/cdi/nvidia.json
}

helm() { /opt/tools/helm --namespace nvshare "$@" >>/logs/helm 2>&1 || fail "helm $1: $(tail -n 5 /logs/helm)"; }

start_node() {
    configure_node
    start_etcd
    start_containerd
    start_api_server
    until_true "the API server" kubectl get --raw /readyz
    start_controllers
    start_kubelet
    until_true "the node" node_is_ready
    until_true "the service account" kubectl get serviceaccount default
    say "the node is ready"
}

import_images() {
    for image in /images/*.tar; do ctr -n k8s.io images import "$image" >/dev/null; done
}
