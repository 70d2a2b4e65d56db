//! `cuGetProcAddress`: the results for names, versions and flags equal the results of driver 580.

use crate::support::*;
use std::ffi::CString;

const SUCCESS: (u32, u32) = (0, 0);

/// The return code, the status and the address.
fn ask(name: &str, version: usize, flags: usize) -> ((u32, u32), usize) {
    let (text, mut at, mut status) = (CString::new(name).expect("no NUL"), 1_usize, 77_u32);
    let code = cu(
        "cuGetProcAddress_v2",
        &[text.as_ptr() as usize, &raw mut at as usize, version, flags, &raw mut status as usize],
    );
    ((code, status), at)
}

#[test]
fn lookups_return_the_form_for_version_and_flags() {
    isolated("lookup::lookups_return_the_form_for_version_and_flags", &[], || {
        for (name, version, flags, want) in [
            ("cuMemAlloc", 3020, 0, "cuMemAlloc_v2"),
            ("cuCtxCreate", 11030, 0, "cuCtxCreate_v2"),
            ("cuCtxCreate", 11040, 0, "cuCtxCreate_v3"),
            ("cuCtxCreate", 13000, 0, "cuCtxCreate_v4"),
            ("cuGetProcAddress", 11030, 0, "cuGetProcAddress"),
            ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
            ("cuStreamQuery", 7000, 0, "cuStreamQuery"),
            ("cuStreamQuery", 7000, 1, "cuStreamQuery"),
            ("cuStreamQuery", 7000, 2, "cuStreamQuery_ptsz"),
            ("cuMemcpyHtoD", 7000, 2, "cuMemcpyHtoD_v2_ptds"),
            ("cuMemcpyHtoD", 7000, 0, "cuMemcpyHtoD_v2"),
            ("cuStreamGetCaptureInfo", 10010, 0, "cuStreamGetCaptureInfo"),
            ("cuStreamGetCaptureInfo", 11030, 2, "cuStreamGetCaptureInfo_v2_ptsz"),
            ("cuStreamGetCaptureInfo", 12030, 0, "cuStreamGetCaptureInfo_v3"),
            ("cuMemCreate", 10020, 2, "cuMemCreate"),
            ("cuGraphInstantiate", 12000, 0, "cuGraphInstantiate_v2"),
        ] {
            assert_eq!(
                ask(name, version, flags),
                (SUCCESS, symbol(want) as usize),
                "{name} at {version}, flags {flags}: want {want}"
            );
        }
    });
}

#[test]
fn unknown_names_and_versions_are_not_found() {
    isolated("lookup::unknown_names_and_versions_are_not_found", &[], || {
        for (name, version, flags, want) in [
            ("cuNope", 12000, 0, (0, 1)),
            ("", 12000, 0, (0, 1)),
            ("cuMemAlloc_v2", 12000, 0, (0, 1)),
            ("cuMemCreate", 10000, 0, (0, 2)),
            ("cuStreamQuery", 2000, 2, (0, 2)),
            ("cuGetProcAddress", 11000, 0, (0, 2)),
        ] {
            assert_eq!(ask(name, version, flags), (want, 0), "{name} at {version}, flags {flags}");
        }
        assert_eq!(ask("cuMemAlloc", 99000, 0).0, (1, 77), "newer than the driver");
        let (text, mut at) = (CString::new("cuNope").expect("no NUL"), 1_usize);
        assert_eq!(
            cu("cuGetProcAddress", &[text.as_ptr() as usize, &raw mut at as usize, 12000, 0]),
            500,
            "the older form has no status"
        );
    });
}

#[test]
fn an_older_driver_lacks_newer_functions() {
    isolated("lookup::an_older_driver_lacks_newer_functions", &[("CUDA_SIM_DRIVER", "11040")], || {
        assert_eq!(ask("cuCtxRecordEvent", 11040, 0), ((0, 1), 0));
        assert_eq!(ask("cuGetProcAddress", 11040, 0), (SUCCESS, symbol("cuGetProcAddress") as usize));
    });
}

#[test]
fn calls_before_cuinit_fail() {
    isolated("lookup::calls_before_cuinit_fail", &[("CUDA_SIM_GPUS", "3"), ("CUDA_VISIBLE_DEVICES", "2,0")], || {
        let mut count = 0_i32;
        assert_eq!(cu("cuDeviceGetCount", &[&raw mut count as usize]), 3);
        assert_eq!(cu("cuInit", &[0]), 0);
        assert_eq!(cu("cuDeviceGetCount", &[&raw mut count as usize]), 0);
        assert_eq!(count, 2);
        let mut id = [0_u8; 16];
        assert_eq!(cu("cuDeviceGetPCIBusId", &[id.as_mut_ptr() as usize, 16, 0]), 0);
        assert_eq!(&id[..12], b"0000:12:00.0", "the third GPU is the first that is visible");
    });
}
