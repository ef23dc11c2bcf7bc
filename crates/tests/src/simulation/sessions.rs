//! Simulation of iSCSI sessions: the real front-end, initiators with several connections each, and a disk
//! that completes requests in any order. Connections are lost, PDUs dropped, damaged and delivered late,
//! commands aborted, sessions reinstated. Initiators recover as at error recovery level 0: they log in again.
//!
//! No acknowledged write may be lost. No write may be applied after the end of its session, or after the
//! answer of the task management function that aborted it. CmdSN, ExpCmdSN, MaxCmdSN and StatSN follow the
//! rules of RFC 7143.

mod initiator;
mod model;
mod target;

use super::{Failure, Outcome, guarded};
use initiator::{Connection, Context, Counts, Session};
use model::{BLOCKS, Model, Shared};
use proto::iscsi::parameters::{ConnectionParameters, Parameters};
use queue::Nanos;
use sim::{Rng, Tracer};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use target::{Agreed, Target};

/// A fault of the target that runs must find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SessionFault {
    /// The disk acknowledges writes that it drops.
    LostWrite,
    /// The disk applies writes after it has acknowledged them, possibly after the end of their session.
    LateWrite,
    /// The target accepts a command more than its window permits.
    WideWindow,
}

impl SessionFault {
    /// All of them.
    pub const ALL: [SessionFault; 3] =
        [SessionFault::LostWrite, SessionFault::LateWrite, SessionFault::WideWindow];
}

/// Steps of a run.
const STEPS: u64 = 2500;
/// Steps without an answer after which an initiator logs in again.
const PATIENCE: u32 = 400;
/// Steps after which a run that is not idle counts as stuck.
const REST_MAX: u64 = 200_000;

struct World {
    rng: Rng,
    tracer: Tracer,
    agreed: Agreed,
    shared: Arc<Mutex<Shared>>,
    target: Target,
    model: Model,
    initiators: Vec<Option<Session>>,
    counts: Counts,
    reinstated: u64,
    last_session: u64,
    now: u64,
    /// Chance per step, in permille, of a fault in a session.
    faults: u32,
}

/// Executes one run.
///
/// # Errors
/// [`Failure`] when a write was lost or applied too late, a number broke the rules, or the run did not end.
pub fn run(seed: u64, fault: Option<SessionFault>) -> Result<Outcome, Box<Failure>> {
    let tracer = Tracer::default();
    let mut rng = Rng::new(seed);
    let agreed = agreed(&mut rng);
    let stack = format!("depth {} {:?} {:?}", agreed.depth, agreed.parameters, agreed.connection);
    guarded(seed, "BLOCKYARD_SESSION_SEED", stack, &tracer, || {
        World::new(rng, tracer.clone(), agreed, fault).run()
    })
}

fn agreed(rng: &mut Rng) -> Agreed {
    let parameters = Parameters {
        max_connections: 3,
        initial_r2t: rng.chance(500),
        immediate_data: rng.chance(700),
        first_burst_length: 4096,
        max_burst_length: 8192,
        max_outstanding_r2t: rng.between(1, 4) as u16,
        ..Parameters::default()
    };
    let connection = ConnectionParameters {
        header_digest: rng.chance(500),
        data_digest: rng.chance(500),
        max_receive_segment: 2048,
        max_send_segment: rng.between(1, 8) as u32 * 512,
        ..ConnectionParameters::default()
    };
    Agreed { parameters, connection, depth: rng.between(1, 16) as u16 }
}

impl World {
    fn new(mut rng: Rng, tracer: Tracer, agreed: Agreed, fault: Option<SessionFault>) -> World {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (tags, memory) = (rng.between(1, 12) as u16, *rng.pick(&[64 << 20, 64 << 10]));
        let target = Target::new(shared.clone(), tags, memory, fault);
        let faults = *rng.pick(&[0, 2, 10]);
        World {
            rng,
            tracer,
            agreed,
            shared,
            target,
            model: Model::default(),
            initiators: (0..2).map(|_| None).collect(),
            counts: Counts::default(),
            reinstated: 0,
            last_session: 0,
            now: 0,
            faults,
        }
    }

    fn note(&self, what: &'static str, value: u64) {
        self.tracer.note(Nanos(self.now), what, &[("value", value)]);
    }

    fn run(mut self) -> Result<Outcome, String> {
        for _ in 0..STEPS {
            self.step(true)?;
        }
        self.note("faults end", 0);
        self.faults = 0;
        self.come_to_rest()?;
        self.final_check()?;
        let (requests, ok) = (self.counts.requests, self.counts.good);
        Ok(Outcome {
            hash: 0,
            events: 0,
            requests,
            ok,
            power_cuts: 0,
            swaps: self.counts.aborts,
            kills: self.reinstated,
        })
    }

    /// One step of a random initiator, or of the disk.
    fn step(&mut self, issues: bool) -> Result<(), String> {
        self.now += 1;
        self.move_disk();
        let which = self.rng.below(self.initiators.len() as u64) as usize;
        let Some(mut session) = self.initiators[which].take() else {
            self.log_in(which)?;
            return self.settle();
        };
        session.idle += 1;
        let hurts = self.rng.chance(self.faults);
        let is_stuck = session.idle > PATIENCE && session.is_waiting();
        let choice = self.rng.below(16);
        let mut cx = Context {
            rng: &mut self.rng,
            model: &mut self.model,
            shared: &self.shared,
            agreed: &self.agreed,
            now: self.now,
            counts: &mut self.counts,
        };
        if session.is_lost || is_stuck || hurts && choice == 8 {
            return self.reinstate(which, session);
        }
        match (hurts, choice) {
            (true, 0) => session.lose(&mut cx),
            (true, 1..4) => session.damage(&mut cx, true),
            (true, 4..8) => session.damage(&mut cx, false),
            (true, _) => session.abort(&mut cx),
            (false, 0..5) if issues => session.issue(&mut cx),
            (false, 5) if issues && session.idle < PATIENCE => session.ping(&mut cx),
            (false, 6..11) => session.deliver(&mut cx, !issues),
            (false, _) => session.receive(&mut cx)?,
        }
        self.initiators[which] = Some(session);
        self.settle()
    }

    /// Makes the disk start or stop holding requests, and complete some of the held ones.
    fn move_disk(&mut self) {
        let mut shared = self.shared.lock().expect("no panic");
        if self.rng.chance(30) {
            shared.holds = !shared.holds;
        }
        let held = shared.held.len() as u64;
        let taken = (held > 0 && self.rng.chance(400)).then(|| self.rng.below(held) as usize);
        let io = taken.map(|at| shared.held.swap_remove(at));
        let late = (!shared.late.is_empty() && self.rng.chance(5)).then(|| shared.late.remove(0));
        late.into_iter().for_each(|(at, bytes)| shared.apply(at, &bytes));
        drop(shared);
        io.into_iter().for_each(|io| self.target.complete(io));
    }

    fn settle(&mut self) -> Result<(), String> {
        self.target.settle()?;
        match self.shared.lock().expect("no panic").violation.take() {
            Some(why) => Err(why),
            None => Ok(()),
        }
    }

    /// Logs an initiator in, with one to three connections.
    fn log_in(&mut self, which: usize) -> Result<(), String> {
        self.last_session += 1;
        // Numbers begin shortly before they wrap.
        let first = 0_u32.wrapping_sub(self.rng.below(20) as u32);
        let opened = self.target.open(which, &self.agreed, first);
        self.note("log in", self.last_session);
        let mut session = Session::new(opened, self.last_session, first, self.agreed.depth);
        for cid in 0..self.rng.between(1, 3) as u16 {
            let stream = self.target.connect(session.opened.id, cid, &self.agreed);
            session.connections.push(Connection::new(stream.ok_or("a new session takes no connection")?));
        }
        self.initiators[which] = Some(session);
        Ok(())
    }

    /// Ends a session as the next login of its initiator does, and waits until it is gone.
    fn reinstate(&mut self, which: usize, session: Session) -> Result<(), String> {
        self.reinstated += 1;
        self.note("reinstate", which as u64);
        self.target.end(session.opened.id);
        for _ in 0..REST_MAX {
            self.settle()?;
            if session.opened.is_gone.load(SeqCst) {
                self.now += 1;
                session.end(&mut self.model, &self.shared, self.now);
                self.target.forget(&session.opened);
                return self.log_in(which);
            }
            // Requests in the stack end before the session does.
            self.move_disk();
        }
        Err("a session does not end".to_owned())
    }

    fn come_to_rest(&mut self) -> Result<(), String> {
        for _ in 0..REST_MAX {
            self.step(false)?;
            self.shared.lock().expect("no panic").holds = false;
            let is_over = |session: &Option<Session>| session.as_ref().is_some_and(|one| !one.is_waiting());
            if self.initiators.iter().all(is_over) && self.shared.lock().expect("no panic").held.is_empty() {
                return Ok(());
            }
        }
        Err("the sessions do not come to rest".to_owned())
    }

    /// Pings every session, so that its numbers are known, and compares the disk with the model.
    fn final_check(&mut self) -> Result<(), String> {
        for which in 0..self.initiators.len() {
            let Some(mut session) = self.initiators[which].take() else { continue };
            for round in 0..2000 {
                let mut cx = Context {
                    rng: &mut self.rng,
                    model: &mut self.model,
                    shared: &self.shared,
                    agreed: &self.agreed,
                    now: self.now,
                    counts: &mut self.counts,
                };
                if round == 0 {
                    session.ping(&mut cx);
                }
                session.deliver(&mut cx, true);
                self.target.settle()?;
                session.receive(&mut cx)?;
            }
            session.check_rest(self.agreed.depth)?;
            self.initiators[which] = Some(session);
        }
        self.now += 1;
        let shared = self.shared.lock().expect("no panic");
        (0..BLOCKS)
            .try_for_each(|block| self.model.check(block, shared.number(block), self.now, self.now + 1))
    }
}
