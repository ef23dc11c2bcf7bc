//! The plan of a read: its Data-In PDUs.

/// A Data-In PDU to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataInPart {
    /// Offset of the data within the command's data, in bytes.
    pub offset: u32,
    /// Bytes of data, at least 1.
    pub len: u32,
    /// DataSN.
    pub data_sn: u32,
    /// F bit: the sequence ends here, because MaxBurstLength is reached or the data ends.
    pub is_final: bool,
    /// Whether this is the last PDU, which can carry a GOOD status (S bit).
    pub is_last: bool,
}

/// Splits the data of a read into PDUs of at most the initiator's MaxRecvDataSegmentLength, and sequences
/// of at most MaxBurstLength. Iterate over it for the PDUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadPlan {
    len: u32,
    done: u32,
    data_sn: u32,
    burst_left: u32,
    segment_max: u32,
    burst_max: u32,
}

impl ReadPlan {
    /// Plans to send `len` bytes. `segment_max` and `burst_max` are in bytes; 0 counts as 512, the smallest
    /// value that can be negotiated.
    pub fn new(len: u32, segment_max: u32, burst_max: u32) -> ReadPlan {
        let (segment_max, burst_max) = (segment_max.max(512), burst_max.max(512));
        ReadPlan { len, done: 0, data_sn: 0, burst_left: burst_max, segment_max, burst_max }
    }

    /// Returns the number of PDUs so far, for ExpDataSN of the SCSI Response.
    pub const fn data_sn(&self) -> u32 {
        self.data_sn
    }

    /// Returns how many bytes remain to be sent.
    pub const fn left(&self) -> u32 {
        self.len - self.done
    }
}

impl Iterator for ReadPlan {
    type Item = DataInPart;

    fn next(&mut self) -> Option<DataInPart> {
        let left = self.left();
        if left == 0 {
            return None;
        }
        let len = left.min(self.segment_max).min(self.burst_left);
        let is_last = len == left;
        let part = DataInPart {
            offset: self.done,
            len,
            data_sn: self.data_sn,
            is_final: is_last || len == self.burst_left,
            is_last,
        };
        self.done += len;
        self.data_sn += 1;
        self.burst_left = if part.is_final { self.burst_max } else { self.burst_left - len };
        Some(part)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn final_bit_ends_each_burst_and_the_data() {
        let parts: Vec<_> = ReadPlan::new(5000, 1024, 2048).collect();
        let short: Vec<_> = parts.iter().map(|part| (part.offset, part.len, part.is_final)).collect();
        assert_eq!(
            short,
            [
                (0, 1024, false),
                (1024, 1024, true),
                (2048, 1024, false),
                (3072, 1024, true),
                (4096, 904, true)
            ]
        );
        assert!(parts.iter().map(|part| part.is_last).eq([false, false, false, false, true]));
    }

    #[test]
    fn nothing_to_send_needs_no_data_in() {
        assert_eq!(ReadPlan::new(0, 8192, 8192).next(), None);
    }

    proptest! {
        #[test]
        fn parts_cover_the_data_within_the_limits(
            len in 0u32..1 << 20, segment in 512u32..1 << 17, burst in 512u32..1 << 18,
        ) {
            let (mut at, mut in_burst, mut sn) = (0, 0, 0);
            let mut plan = ReadPlan::new(len, segment, burst);
            for part in plan.by_ref() {
                prop_assert_eq!((part.offset, part.data_sn), (at, sn));
                prop_assert!(part.len > 0 && part.len <= segment);
                at += part.len;
                sn += 1;
                in_burst += part.len;
                prop_assert!(in_burst <= burst);
                prop_assert_eq!(part.is_last, at == len);
                if part.is_final {
                    prop_assert!(part.is_last || in_burst == burst);
                    in_burst = 0;
                }
            }
            prop_assert_eq!((at, in_burst, plan.data_sn()), (len, 0, sn));
        }
    }
}
