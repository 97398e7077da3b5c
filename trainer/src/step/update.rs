//! Updates and Hessian estimates: one group at a time, on what this rank keeps of it.

use super::{Due, Produced, Step};
use crate::activations::Phase;
use crate::estimate::Tick;
use castor_kernels::ops::State;
use castor_runtime::{Access, GroupId, Lease, Result, Role};

impl Step<'_> {
    /// Makes the update of every group at once, for want of a next step.
    ///
    /// # Errors
    /// If the world below refuses.
    pub fn update(&mut self, due: &Due) -> Result<()> {
        self.updates_on_host(Some(due), Phase::Update)?;
        for group in (0..self.model.groups.count() as u32).map(GroupId) {
            self.update_due(Some(due), group, Phase::Update)?;
        }
        Ok(())
    }

    /// Makes the update of a group that the device updates.
    pub(super) fn update_due(&mut self, due: Option<&Due>, group: GroupId, phase: Phase) -> Result<()> {
        let Some(due) = due.filter(|_| !self.updates_group_on_host(group)) else { return Ok(()) };
        self.tick(Tick::Update, group, phase)?;
        let gradient = self.mgr.acquire(group.chunk(Role::Gradient), Access::ReadShard)?;
        self.update_group(group, gradient, due)
    }

    /// Gives the host's cores their updates, in the order in which the forward will want the weights.
    pub(super) fn updates_on_host(&mut self, due: Option<&Due>, phase: Phase) -> Result<()> {
        let Some(due) = due else { return Ok(()) };
        for group in self.model.updated_on_host.clone().map(|group| GroupId(group as u32)) {
            self.tick(Tick::UpdateOnHost, group, phase)?;
            let gradient = self.mgr.acquire(group.chunk(Role::Gradient), Access::ReadOnHost)?;
            self.update_group(group, gradient, due)?;
        }
        Ok(())
    }

    fn updates_group_on_host(&self, group: GroupId) -> bool {
        self.model.updated_on_host.contains(&u64::from(group.0))
    }

    /// Makes the update that follows from a gradient, if updates do not wait for the norm. A gradient that is not
    /// finite on any rank holds back the update of its own group (L9); the others' may be made already. There is no
    /// loss scale, and the last step's norm is in the gradient.
    pub(super) fn update_behind(&mut self, gradient: Option<Produced>, phase: Phase) -> Result<()> {
        let Some(Produced { group, lease }) = gradient else { return Ok(()) };
        let Some(due) = self.behind else { return lease.map_or(Ok(()), |lease| self.mgr.release(lease)) };
        self.tick(Tick::Update, group, phase)?;
        self.ops.norm_finish(self.slot(group), 0.0, 1.0, self.inputs.control());
        let lease = match lease {
            Some(lease) => lease,
            None => self.mgr.acquire(group.chunk(Role::Gradient), Access::ReadShard)?,
        };
        self.update_group(group, lease, &due)
    }

    /// Takes the gradients into every group's Hessian estimate. `tokens` counted in the estimate.
    ///
    /// # Errors
    /// If the world below refuses.
    pub fn hessian(&mut self, beta2: f32, tokens: f32, inverse_loss_scale: f32) -> Result<()> {
        for group in (0..self.model.groups.count() as u32).map(GroupId) {
            self.tick(Tick::Hessian, group, Phase::Update)?;
            let gradient = self.mgr.acquire(group.chunk(Role::Gradient), Access::ReadShard)?;
            let hessian = self.mgr.acquire(group.chunk(Role::Second), Access::UpdateShard)?;
            self.ops.hessian(
                gradient.view(),
                hessian.view(),
                beta2,
                tokens,
                inverse_loss_scale,
                self.inputs.hessian_control(),
            );
            self.mgr.release(gradient)?;
            self.mgr.release(hessian)?;
        }
        Ok(())
    }

    fn update_group(&mut self, group: GroupId, gradient: Lease, due: &Due) -> Result<()> {
        let access = if self.updates_group_on_host(group) { Access::UpdateOnHost } else { Access::UpdateShard };
        let mut acquire = |role| self.mgr.acquire(group.chunk(role), access);
        let parameter = acquire(Role::Parameter)?;
        let first = acquire(Role::First)?;
        let second = acquire(Role::Second)?;
        let has_master = self.mgr.layout().formats.master.is_some();
        let master = if has_master { Some(self.mgr.acquire(group.chunk(Role::Master), access)?) } else { None };
        let laid_out = self.mgr.layout().group(group);
        let state = State {
            parameter: parameter.view(),
            gradient: gradient.view(),
            master: master.as_ref().map(Lease::view),
            first: first.view(),
            second: second.view(),
            decayed: laid_out.decayed.saturating_sub(parameter.first()).min(parameter.elements()),
            seed: due.seed,
            first_element: laid_out.first_element + parameter.first(),
        };
        self.ops.update(due.update, state, self.inputs.control());
        self.mgr.release(gradient)?;
        self.mgr.release(first)?;
        self.mgr.release(second)?;
        if let Some(master) = master {
            self.mgr.release(master)?;
        }
        self.mgr.release(parameter)
    }
}
