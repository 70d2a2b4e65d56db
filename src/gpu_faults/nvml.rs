//! NVML's data about faults: events and the driver's recommendations.

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::struct_wrappers::event::EventData;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, EventSet, Nvml};
use tracing::debug;

use super::{Advice, Event};

/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION` of `nvml.h`. Drivers support it since R570.
const RECOVERY_ACTION: FieldId = FieldId(230);

/// `NVML_ERROR_UNKNOWN`, used as the number of an unknown XID.
const UNKNOWN_XID: u64 = 999;

/// Returns the driver's recommendation for a GPU.
pub fn advice(device: &Device<'_>) -> Advice {
    let values = device.field_values_for(&[RECOVERY_ACTION]).unwrap_or_default();
    let value = values.into_iter().next().and_then(Result::ok).and_then(|sample| sample.value.ok());
    match value {
        Some(SampleValue::U32(0)) => Advice::Nothing,
        Some(SampleValue::U32(action)) => Advice::Action(action.into()),
        _ => Advice::Unknown,
    }
}

/// Registers for fault events of these GPUs. Returns the event set and the number of GPUs that
/// support events. The event set is `None` if no GPU supports events.
pub fn watch<'nvml>(nvml: &'nvml Nvml, gpus: Vec<Device<'nvml>>) -> (Option<EventSet<'nvml>>, usize) {
    let wanted = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
    let types = |device: &Device<'_>| device.supported_event_types().unwrap_or(EventTypes::empty()) & wanted;
    let able = gpus.into_iter().map(|device| (types(&device), device)).filter(|(types, _)| !types.is_empty());
    let mut able: Vec<(EventTypes, Device<'nvml>)> = able.collect();
    // A failed registration consumes the set, so the loop starts again without that GPU.
    'anew: while !able.is_empty() {
        let Ok(mut set) = nvml.create_event_set() else { break };
        for at in 0..able.len() {
            let Some((types, device)) = able.get(at) else { continue };
            match device.register_events(*types, set) {
                Ok(with) => set = with,
                Err(e) => {
                    debug!("cannot receive a GPU's events: {}", e.error);
                    able.remove(at);
                    continue 'anew;
                }
            }
        }
        return (Some(set), able.len());
    }
    (None, 0)
}

/// Returns the event if it is a fault of a GPU.
pub fn event(of: &EventData<'_>) -> Option<Event> {
    match (&of.event_data, of.event_type) {
        (Some(XidError::Value(xid)), _) => Some(Event::Xid(*xid)),
        (Some(XidError::Unknown), _) => Some(Event::Xid(UNKNOWN_XID)),
        (None, types) if types.contains(EventTypes::DOUBLE_BIT_ECC_ERROR) => Some(Event::DoubleBitEcc),
        _ => None,
    }
}
