package discover

import (
	"context"
	"errors"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// examineAgain is how long a pod that could not be examined is left alone.
const examineAgain = 3 * time.Second

// sync makes the fleet's members those of the slices: ready pods are examined and added,
// terminating ones drain, others are removed.
func (f *follower) sync(ctx context.Context) {
	want := map[string]bool{}
	for _, s := range f.slices {
		port := f.port(s)
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			yes := func(b *bool, unknown bool) bool { return b == nil && unknown || b != nil && *b }
			ready, ending := yes(e.Conditions.Ready, true), yes(e.Conditions.Terminating, false)
			if len(e.Addresses) == 0 || port == 0 || !ready && !(ending && yes(e.Conditions.Serving, false)) {
				continue
			}
			id, uid := f.s.Name+"-"+e.Addresses[0], ""
			if e.Target != nil {
				id, uid = e.Target.Name, e.Target.UID
			}
			id = named("", id)
			want[id] = true
			f.pod(ctx, id, uid+" "+e.Addresses[0]+" "+strconv.Itoa(port), fleet.Instance{
				ID: id, Role: f.s.Role, URL: "http://" + net.JoinHostPort(e.Addresses[0], strconv.Itoa(port)), Dialect: f.s.Dialect,
				Model: f.s.Model, Draining: ending, Topology: e.Zone,
				Bootstrap: at(e.Addresses[0], f.s.BootstrapPort), KVEvents: at(e.Addresses[0], f.s.KVEventsPort), KVReplay: at(e.Addresses[0], f.s.KVReplayPort),
			})
		}
	}
	for id, p := range f.pods {
		if !want[id] {
			if p.added {
				f.k.fleet.Remove(id, "no endpoint of service "+f.s.Name+" any more")
			}
			f.k.no.forget(fromKube, id)
			delete(f.pods, id)
		}
	}
}

func at(host string, port int) string {
	if port == 0 {
		return ""
	}
	return net.JoinHostPort(host, strconv.Itoa(port))
}

// port is the service's port in a slice, 0 if it has none.
func (f *follower) port(s *slice) int {
	for _, p := range s.Ports {
		if f.s.Port == "" || p.Name == f.s.Port || strconv.Itoa(p.Port) == f.s.Port {
			return p.Port
		}
	}
	return 0
}

// pod brings one pod up to what its slice says.
func (f *follower) pod(ctx context.Context, id, uid string, inst fleet.Instance) {
	p := f.pods[id]
	if p != nil && p.uid != uid { // another pod of that name
		if p.added {
			f.k.fleet.Remove(id, "it was replaced")
		}
		p = nil
	}
	if p == nil {
		p = &pod{uid: uid, epoch: fleet.NewEpoch()}
		f.pods[id] = p
	}
	inst.Epoch = p.epoch
	if p.added {
		if p.inst.Draining != inst.Draining {
			p.inst.Draining = inst.Draining
			f.add(p)
		}
		return
	}
	if inst.Draining || time.Now().Before(p.next) {
		return
	}
	p.next = time.Now().Add(examineAgain)
	host, _, _ := net.SplitHostPort(inst.URL[len("http://"):]) // made above
	facts, err := Examine(ctx, f.k.ask, inst.URL)
	switch {
	case ctx.Err() != nil:
		return
	case err != nil && f.s.Model == "":
		f.refuse(id, err)
		return
	case err != nil: // it need not tell
		facts = &Facts{}
		facts.Add(ctx, f.k.ask, inst.URL)
	case f.s.Model == "":
		inst.Model = facts.Models[0]
	case !slices.Contains(facts.Models, f.s.Model):
		f.refuse(id, errors.New("it serves "+facts.Models[0]+", the service is for "+f.s.Model))
		return
	}
	facts.Describe(&inst, host)
	p.inst = inst
	f.add(p)
}

func (f *follower) add(p *pod) {
	if err := f.k.fleet.AddStatic(p.inst, fleet.Kube); err != nil {
		f.refuse(p.inst.ID, err)
		return
	}
	if !p.added {
		f.k.log.Info("pod found", "id", p.inst.ID, "service", f.s.Name, "role", string(p.inst.Role), "model", p.inst.Model, "version", p.inst.Version)
	}
	p.added = true
	f.k.no.forget(fromKube, p.inst.ID)
}

func (f *follower) refuse(id string, err error) {
	if f.k.no.note(Refusal{From: fromKube, Name: id, Reason: err.Error(), At: time.Now()}) {
		f.k.log.Warn("pod refused", "id", id, "service", f.s.Name, "reason", err.Error())
	}
}
