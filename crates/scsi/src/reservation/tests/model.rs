//! Tests random commands of a few nexuses with a few keys against a slow model, which is written from the
//! tables of SPC-6 section 5.14 and shares no code with the state machine.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Nexuses: initiators 0 to 2 at ports 1 and 2.
const NEXUSES: [(u8, u16); 6] = [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Good,
    Conflict,
    Check,
}

/// Key of each registered nexus, and the reservation with the number of its holder.
#[derive(Clone, Default, Debug)]
struct Model {
    keys: BTreeMap<usize, u64>,
    /// Type and holder; the holder is ignored for types 7 and 8.
    reservation: Option<(u8, usize)>,
    generation: u32,
    /// Unit attention of each nexus after the last command.
    attentions: BTreeMap<usize, u8>,
}

impl Model {
    fn all_registrants(&self) -> bool {
        matches!(self.reservation, Some((7 | 8, _)))
    }

    fn is_holder(&self, nexus: usize) -> bool {
        match self.reservation {
            Some((7 | 8, _)) => self.keys.contains_key(&nexus),
            Some((_, holder)) => holder == nexus,
            None => false,
        }
    }

    fn tell_others(&mut self, sender: usize, code: u8) {
        for nexus in self.keys.keys().filter(|nexus| **nexus != sender) {
            self.attentions.insert(*nexus, code);
        }
    }

    fn unregister(&mut self, nexus: usize, sender: usize) {
        let (kind, was_holder) = (self.reservation.map(|(kind, _)| kind), self.is_holder(nexus));
        if self.keys.remove(&nexus).is_none() {
            return;
        }
        match kind {
            Some(1 | 3) if was_holder => self.reservation = None,
            Some(5 | 6) if was_holder => {
                self.reservation = None;
                self.tell_others(sender, 4);
            }
            Some(7 | 8) if self.keys.is_empty() => self.reservation = None,
            _ => (),
        }
    }

    fn out(&mut self, nexus: usize, out: &Out) -> End {
        self.attentions.clear();
        let key = self.keys.get(&nexus).copied();
        let code = out.action as u8;
        if code == 0 || code == 6 {
            return self.register(nexus, key, out);
        }
        if key != Some(out.key) {
            return End::Conflict;
        }
        let is_known = matches!(out.kind, 1 | 3 | 5 | 6 | 7 | 8);
        match code {
            1 if !is_known => return End::Check,
            1 => match self.reservation {
                None => self.reservation = Some((out.kind, nexus)),
                Some((kind, _)) if kind == out.kind && self.is_holder(nexus) => (),
                Some(_) => return End::Conflict,
            },
            2 if !self.is_holder(nexus) => (),
            2 => {
                let (kind, _) = self.reservation.unwrap();
                if kind != out.kind {
                    return End::Check;
                }
                self.reservation = None;
                if kind > 3 {
                    self.tell_others(nexus, 4);
                }
            }
            3 => {
                self.tell_others(nexus, 3);
                (self.keys, self.reservation) = (BTreeMap::new(), None);
                self.generation += 1;
            }
            _ => return self.preempt(nexus, out, is_known),
        }
        End::Good
    }

    fn register(&mut self, nexus: usize, key: Option<u64>, out: &Out) -> End {
        if out.action as u8 == 0 && out.key != key.unwrap_or(0) {
            return End::Conflict;
        }
        if key.is_none() && out.action_key == 0 {
            return End::Good;
        }
        let initiator = NEXUSES[nexus].0;
        let is_meant = |other: usize| other == nexus || (out.all_ports && NEXUSES[other].0 == initiator);
        for other in (0..NEXUSES.len()).filter(|other| is_meant(*other)) {
            match out.action_key {
                0 => self.unregister(other, nexus),
                key => drop(self.keys.insert(other, key)),
            }
        }
        // Ports that are unregistered together are not notified of the end of their reservation.
        let keys = &self.keys;
        self.attentions.retain(|other, _| keys.contains_key(other));
        self.generation += 1;
        End::Good
    }

    fn preempt(&mut self, nexus: usize, out: &Out, is_known: bool) -> End {
        let target = out.action_key;
        let everybody = self.all_registrants() && target == 0;
        if target == 0 && !everybody {
            return End::Check;
        }
        let of_holder = self.reservation.filter(|(kind, _)| *kind < 7).map(|(_, holder)| self.keys[&holder]);
        if everybody || of_holder == Some(target) {
            if !is_known {
                return End::Check;
            }
            let (before, _) = self.reservation.unwrap();
            let lost: Vec<usize> = self
                .keys
                .iter()
                .filter(|(n, k)| **n != nexus && (everybody || **k == target))
                .map(|(n, _)| *n)
                .collect();
            for other in &lost {
                self.keys.remove(other);
            }
            self.reservation = Some((out.kind, nexus));
            if before != out.kind {
                self.tell_others(nexus, 4);
            }
            self.attentions.extend(lost.into_iter().map(|other| (other, 5)));
        } else {
            let lost: Vec<usize> = self.keys.iter().filter(|(_, k)| **k == target).map(|(n, _)| *n).collect();
            if lost.is_empty() {
                return End::Conflict;
            }
            for other in lost {
                self.keys.remove(&other);
                if other != nexus {
                    self.attentions.insert(other, 5);
                }
            }
            if self.keys.is_empty() {
                self.reservation = None;
            }
        }
        self.generation += 1;
        End::Good
    }

    fn may(&self, nexus: usize, write: bool) -> bool {
        let Some((kind, _)) = self.reservation else { return true };
        self.is_holder(nexus)
            || (kind >= 5 && self.keys.contains_key(&nexus))
            || (!write && matches!(kind, 1 | 5 | 7))
    }
}

fn any_command() -> impl Strategy<Value = (usize, Out)> {
    let actions = prop::sample::select(&Action::ALL[..7]);
    let kinds = prop::sample::select(vec![0_u8, 1, 2, 3, 5, 6, 7, 8]);
    (0..NEXUSES.len(), actions, kinds, 0..4_u64, 0..4_u64, prop::bool::weighted(0.2)).prop_map(
        |(nexus, action, kind, key, action_key, all_ports)| {
            // Only the service actions that register allow ALL_TG_PT: see `Out::parse`.
            let all_ports = all_ports && matches!(action, Action::Register | Action::RegisterAndIgnore);
            (nexus, Out { kind, action_key, all_ports, ..command(action, key) })
        },
    )
}

/// The state machine and the model, which execute the same commands.
#[derive(Clone, Default)]
struct Pair {
    unit: Unit,
    model: Model,
}

impl Pair {
    fn step(&mut self, names: &[NexusName; 6], sender: usize, out: &Out) -> Result<(), TestCaseError> {
        let Pair { unit, model } = self;
        let before = unit.state.clone();
        let result = unit.out(&names[sender], out);
        let end = match &result {
            Ok(_) => End::Good,
            Err(Failure::Conflict) => End::Conflict,
            Err(Failure::Check(_)) => End::Check,
        };
        prop_assert_eq!(end, model.out(sender, out), "{} {:?} in {:?}", sender, out, before);
        let mut attentions = BTreeMap::new();
        match result {
            Ok(change) => {
                for (port, sense) in change.attentions {
                    let number = names.iter().position(|name| port.covers(name)).unwrap();
                    prop_assert!(attentions.insert(number, sense.ascq).is_none(), "two for one nexus");
                }
            }
            Err(_) => prop_assert_eq!(&unit.state, &before, "a failure changes nothing"),
        }
        prop_assert_eq!(&attentions, &model.attentions, "{} {:?} in {:?}", sender, out, before);
        prop_assert_eq!(unit.state.generation(), model.generation);
        let number =
            |known: &Registration| names.iter().position(|name| known.registrant.covers(name)).unwrap();
        let registered: BTreeMap<usize, u64> =
            unit.state.registrations().iter().map(|known| (number(known), known.key)).collect();
        prop_assert_eq!(&registered, &model.keys);
        prop_assert_eq!(
            unit.state.held().map(|held| held.kind as u8),
            model.reservation.map(|(kind, _)| kind)
        );
        for (number, name) in names.iter().enumerate() {
            prop_assert_eq!(unit.reads(name), model.may(number, false), "{} reads", number);
            prop_assert_eq!(unit.writes(name), model.may(number, true), "{} writes", number);
        }
        Ok(())
    }
}

fn names() -> [NexusName; 6] {
    NEXUSES.map(|(initiator, port)| nexus(initiator, port))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_commands_do_what_the_slow_model_does(commands in prop::collection::vec(any_command(), 1..40)) {
        let (mut pair, names) = (Pair::default(), names());
        for (sender, out) in &commands {
            pair.step(&names, *sender, out)?;
        }
    }
}

/// Tests all sequences of two commands of two nexuses, starting from a reservation of each type.
#[test]
fn every_pair_of_commands_does_what_the_slow_model_does() {
    let mut commands = Vec::new();
    for (sender, action) in
        [0, 2].into_iter().flat_map(|sender| Action::ALL[..7].iter().map(move |a| (sender, *a)))
    {
        let has_kind = matches!(action, Action::Reserve | Action::Release | Action::Preempt);
        for kind in if has_kind { &[1_u8, 5, 8][..] } else { &[1] } {
            for (key, action_key) in [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)] {
                commands.push((sender, Out { kind: *kind, action_key, ..command(action, key) }));
            }
        }
    }
    let names = names();
    for kind in Kind::ALL {
        let mut start = Pair::default();
        let register = |action_key| Out { action_key, ..command(Action::Register, 0) };
        start.step(&names, 0, &register(1)).unwrap();
        start.step(&names, 2, &register(2)).unwrap();
        start.step(&names, 0, &Out { kind: kind as u8, ..command(Action::Reserve, 1) }).unwrap();
        for (sender, first) in &commands {
            let mut after = start.clone();
            after.step(&names, *sender, first).unwrap();
            for (sender, second) in &commands {
                after.clone().step(&names, *sender, second).unwrap();
            }
        }
    }
}
