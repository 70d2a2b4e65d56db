//! Drivers that are old or broken, or whose GPUs nvshare must not share. The program gets the
//! driver's own answers.

use std::{fs, os::unix::net::UnixListener};

use crate::compare::*;
use test_support::machine::*;

/// Functions of the simulated driver that driver 535 lacks.
const NEWER_THAN_535: &str = "\
    cuCtxCreate_v4 cuCtxGetDevice_v2 cuCtxSynchronize_v2 cuCtxRecordEvent cuCtxWaitEvent cuDeviceGetDevResource \
    cuCtxGetDevResource cuGreenCtxGetDevResource cuDevSmResourceSplitByCount cuDevResourceGenerateDesc cuGreenCtxCreate \
    cuGreenCtxDestroy cuCtxFromGreenCtx cuGreenCtxRecordEvent cuGreenCtxWaitEvent cuGreenCtxStreamCreate \
    cuStreamGetGreenCtx cuLogicalEndpointBindMem cuEventElapsedTime_v2 cuModuleGetFunctionCount cuLibraryGetKernelCount \
    cuLibraryEnumerateKernels cuKernelGetLibrary cuKernelGetName cuKernelGetParamInfo cuFuncGetName cuFuncGetParamInfo \
    cuFuncIsLoaded cuFuncLoad cuGraphAddDependencies_v2 cuGraphGetEdges_v2 cuGraphNodeGetDependencies_v2 cuStreamGetDevice \
    cuStreamGetDevice_ptsz cuStreamGetCtx_v2 cuStreamGetCtx_v2_ptsz cuMemcpyBatchAsync cuMemcpyBatchAsync_ptsz \
    cuMemcpyBatchAsync_v2 cuMemcpyBatchAsync_v2_ptsz cuMemcpy3DBatchAsync cuMemcpy3DBatchAsync_ptsz \
    cuMemcpy3DBatchAsync_v2 cuMemcpy3DBatchAsync_v2_ptsz cuMemcpyWithAttributesAsync cuMemcpyWithAttributesAsync_ptsz \
    cuMemcpy3DWithAttributesAsync cuMemcpy3DWithAttributesAsync_ptsz cuStreamBeginCaptureToGraph \
    cuStreamBeginCaptureToGraph_ptsz cuStreamGetCaptureInfo_v3 cuStreamGetCaptureInfo_v3_ptsz \
    cuStreamUpdateCaptureDependencies_v2 cuStreamUpdateCaptureDependencies_v2_ptsz";

#[test]
fn a_program_runs_with_old_and_new_drivers() {
    let settings = [
        ("", &[("CUDA_SIM_VMM", "0")][..]),
        ("cuGetProcAddress_v2", &[("CUDA_SIM_DRIVER", "11080")]),
        ("cuGetProcAddress_v2 cuGetProcAddress", &[("CUDA_SIM_DRIVER", "11020")]),
        ("cuCtxRecordEvent cuCtxWaitEvent", &[]),
        (NEWER_THAN_535, &[("CUDA_SIM_DRIVER", "12020")]),
        // The hooks for memory and captures rely on these functions.
        ("cuMemCreate cuMemMap cuMemAddressReserve cuMemSetAccess", &[("CUDA_SIM_VMM", "0")]),
        ("cuThreadExchangeStreamCaptureMode cuStreamIsCapturing cuDeviceGetUuid_v2 cuDeviceGetUuid", &[]),
    ];
    for (without, simulator) in settings {
        let simulator = simulator.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        let host = Host(Machine::with_scheduler(Setup { without, simulator, ..Setup::default() }));
        host.succeeds("worker", &["3"]);
        assert_eq!(host.clients(), 1, "without {without:?}");
    }
}

#[test]
fn an_invalid_driver_file_gives_the_loaders_error() {
    let host = Host::new();
    let (linked, loading) = (host.program("worker"), host.program("tries"));
    let driver = host.0.path("lib").join("libcuda.so.1");
    let intact = fs::read(&driver).expect("the driver");
    for broken in [&b""[..], b"not a library\n", intact.get(..64).expect("a beginning")] {
        fs::remove_file(&driver).expect("a link");
        fs::write(&driver, broken).expect("a broken driver");
        assert_eq!(host.case(&linked, &["1"]).same().status, (Some(127), None));
        let ended = host.case(&loading, &["libcuda.so.1"]).same();
        assert!(ended.stdout.contains("libcuda.so.1: "), "{ended:?}");
    }
    assert_eq!(host.clients(), 0);
}

#[test]
fn a_missing_driver_gives_the_loaders_error() {
    let host = Host::new();
    let program = host.program("tries");
    let ended = host.case(&program, &["libcuda-of-nobody.so.1"]).same();
    assert_eq!(ended.status, (Some(3), None), "{ended:?}");
    fs::remove_file(host.0.path("lib").join("libcuda.so.1")).expect("a link");
    let ended = host.case(&program, &["libcuda.so.1"]).same();
    assert_eq!(ended.status, (Some(3), None), "{ended:?}");
}

/// The library does not share a GPU that is already shared in another way, or whose memory is the
/// host's.
#[test]
fn integrated_exclusive_and_mps_gpus_are_left_alone() {
    let host = Host::new();
    let program = host.program("worker");
    let attached = || host.0.moves().iter().filter(|m| m.what == "attach").count();
    host.case(&program, &["1"]).on_bare_driver().succeeds();
    assert_eq!(attached(), 1, "a plain GPU is shared");
    // The attributes stand for an integrated GPU, for the compute modes prohibited and
    // exclusive-process, and for MPS.
    for attribute in ["18=1", "20=2", "20=3", "133=1"] {
        host.case(&program, &["1"]).on_bare_driver().env("BARE_ATTRIBUTE", attribute).succeeds();
        assert_eq!(attached(), 1, "with device attribute {attribute}");
    }
}

/// Drivers before 545 don't report whether MPS shares a GPU.
#[test]
fn on_drivers_before_545_mps_is_recognized_by_its_daemon() {
    let host = Host::new();
    let program = host.program("worker");
    let attached = || host.0.moves().iter().filter(|m| m.what == "attach").count();
    let directory = host.0.path("mps");
    fs::create_dir(&directory).expect("a directory");
    let runs = |attributes: &str| {
        let case = host.case(&program, &["1"]).on_bare_driver().env("BARE_ATTRIBUTES", attributes);
        case.env("CUDA_MPS_PIPE_DIRECTORY", &directory.to_string_lossy()).succeeds();
    };
    runs("133");
    assert_eq!(attached(), 1, "no daemon");
    let daemon = UnixListener::bind(directory.join("control")).expect("a socket");
    runs("133");
    assert_eq!(attached(), 1, "a daemon");
    runs("134");
    assert_eq!(attached(), 2, "a daemon that the driver does not use");
    drop(daemon);
    runs("133");
    assert_eq!(attached(), 3, "a daemon that has ended");
}

#[test]
fn a_failing_cuinit_leaves_the_program_unmanaged() {
    let host = Host::new();
    let program = host.program("tries");
    for (name, value) in [("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1")] {
        let ended = host.case(&program, &["libcuda.so.1"]).env(name, value).same();
        assert_eq!(ended.status, (Some(4), None), "{ended:?}");
    }
    assert_eq!(host.clients(), 0);
    // The first `cuInit` fails, but the program's second attempt succeeds.
    host.case(&program, &["libcuda.so.1"]).env("CUDA_SIM_FAIL", "cuInit:1").succeeds();
    assert_eq!(host.clients(), 2, "it asked before the first attempt which GPUs it is to see");
}

/// Calls of a function that nvshare doesn't know may submit work without waiting for the lock. So
/// memory that such work may use must stay on the GPU from the first call on, but not before.
#[test]
fn calling_an_unknown_driver_function_pins_the_memory() {
    let host = Host::new();
    let program = host.program("unheard");
    for (word, noticed) in [("called", true), ("found", false)] {
        host.case(&program, &[word]).succeeds();
        let mut running = host.case(&program, &[word]).start();
        assert_eq!(end(&mut running).stdout, "worked\n");
        let said = host.0.moves().iter().any(|m| m.pid == running.pid() && m.what == "untracked-work");
        assert_eq!(said, noticed, "{word}");
    }
}
