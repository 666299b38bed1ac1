package fleet

import (
	"cmp"
	"fmt"
	"time"
)

// registry is the state machine of a watcher: no I/O, no clock, no locks. Time comes in with
// every call and must not run backwards.
//
// Silence is measured on the witnessed clock, which advances only when an echo that the watcher
// sent to itself comes back through NATS: by the time since the last echo was sent, at most
// echoStep. What was published before an echo arrives before it. So no worker is blamed for
// silence while the link is down or the watcher's own process was stopped. An HTTP probe shows
// whether only the worker's link is cut.
type registry struct {
	grace      time.Duration // during which silence kills no member after the link is back
	maxMembers int

	members   map[string]*record
	revoked   revocations
	asked     map[string]time.Time // last query, by unknown id
	witnessed time.Duration
	proved    time.Time // send time of the newest echo that came back
	link      Link
	judgeFrom time.Time // silence is not judged earlier
	version   uint64
	stale     bool    // Load or Heard changed since the last snapshot
	events    []event // since the last change, for log and metrics
}

// record is a member, with what only the registry needs.
type record struct {
	Member
	heard         time.Duration // witnessed clock at the last message
	proof         time.Duration // witnessed clock when the last answered probe was sent
	probed        time.Time     // when the last probe was sent
	probing       bool          // a probe is running
	seen          time.Time     // the last message, even an ignored one
	deafUntil     time.Time     // signs of life are ignored until then
	reports       int           // reported deaths; each doubles the deafness
	lived         time.Time     // when it became live, before it lapsed
	removed       bool          // by an operator
	owes          bool          // a fleet secret was retired: only a message over NATS counts
	came          time.Time     // its first message
	before        *Instance     // whom it replaced; nil: nobody known
	claims        bool          // before was well, and still beats as if nothing had happened
	heardOld      time.Time     // its last beat
	namesake      uint64        // epoch of the process of Namesake
	namesakeHeard time.Time
}

// underWay is how long messages may arrive after their sender's connection ended.
const underWay = 500 * time.Millisecond

// Causes of an event, a closed set: they are metric labels.
const (
	causeJoin    = "join"
	causeBack    = "back"
	causeSilence = "silence"
	causeReport  = "report"
	causeReplace = "replaced"
	causeBye     = "bye"
	causeRemove  = "removed"
	causeForget  = "forgotten"
	causeFull    = "full"
	causeRevoked = "revoked"
	causeTwice   = "twice" // a second process has the id
)

type event struct {
	id     string
	role   Role
	epoch  uint64
	state  State
	cause  string
	reason string

	draining bool // the member was
}

const maxDoublings = 3

func newRegistry(grace time.Duration, maxMembers int, now time.Time) *registry {
	return &registry{
		grace: grace, maxMembers: maxMembers,
		members: map[string]*record{},
		revoked: revocations{},
		asked:   map[string]time.Time{},
		proved:  now,
		link:    Link{Since: now},
	}
}

// apply handles one message. It returns an id to ask for its announcement, or "".
func (r *registry) apply(m *message, now time.Time) (ask string) {
	if id := cmp.Or(m.inst.ID, m.beat.ID); r.revoked.has(id) {
		return ""
	}
	switch m.kind {
	case kindRevoked:
		r.revoke(m.revoked, now)
	case kindAnnounce:
		r.announce(&m.inst, NATS, now)
	case kindBeat:
		return r.beat(&m.beat, now)
	case kindBye:
		r.bye(&m.beat, now)
	}
	return ""
}

// announce adds or replaces a member. An older epoch loses unless the newer one has ended
// (yields), or it turns out that the older one never ended (twice). Of equal epochs the later
// announcement wins, unless the member left or was removed: then only a newer epoch brings it back.
func (r *registry) announce(inst *Instance, source Source, now time.Time) bool {
	rec := r.members[inst.ID]
	if rec != nil {
		rec.seen = now
		if source == NATS && rec.refuses(inst.Epoch) {
			return false
		}
		if inst.Epoch < rec.Epoch && !(source == NATS && rec.yields(now)) || inst.Epoch == rec.Epoch && rec.State == Gone {
			return false
		}
		if inst.Epoch == rec.Epoch && source == NATS && rec.Source == NATS {
			if !r.alive(rec, now) {
				return false
			}
			rec.owes = false
			rec.Load = inst.Load
			if !rec.Instance.Equal(inst) {
				rec.Instance = *inst
				r.version++
			}
			return true
		}
	} else if !r.room() {
		r.note(&record{Member: Member{Instance: *inst, State: Gone}}, causeFull,
			fmt.Sprintf("the table of %d members is full", r.maxMembers))
		return false
	}
	alive := rec != nil && rec.Serves()
	if rec != nil && rec.Source == NATS && !over(rec.State) { // the end of that process was not seen
		r.end(rec, Dead, causeReplace, fmt.Sprintf("replaced by epoch %d", inst.Epoch), now)
	}
	delete(r.asked, inst.ID)
	was := rec
	rec = &record{
		Member: Member{Instance: *inst, State: Live, Since: now, Heard: now, Source: source},
		heard:  r.witnessed, seen: now, came: now,
	}
	if was != nil && was.Source == NATS {
		before := was.Instance // alone: was has its own before
		rec.before, rec.heardOld = &before, now
		rec.claims = alive && !was.Draining
		if was.namesake != inst.Epoch {
			rec.namesake, rec.Namesake, rec.namesakeHeard = was.namesake, was.Namesake, was.namesakeHeard
		}
	}
	r.members[inst.ID] = rec
	r.version++
	r.note(rec, causeJoin, "")
	return true
}

// learn is Watcher.Learn.
func (r *registry) learn(was, is *Instance) bool {
	rec := r.members[was.ID]
	if rec == nil || rec.Source == NATS || rec.State == Gone {
		return false
	}
	now, next := *was, *is
	now.Draining, now.WaitOnly, now.Load = rec.Draining, rec.WaitOnly, rec.Load
	next.Draining, next.WaitOnly, next.Load = rec.Draining, rec.WaitOnly, rec.Load
	if !rec.Instance.Equal(&now) {
		return false
	}
	rec.Instance = next
	r.version++
	return true
}

// room makes room for one more member, if need be by forgetting the one longest dead or gone.
func (r *registry) room() bool {
	if len(r.members) < r.maxMembers {
		return true
	}
	var oldest *record
	for _, rec := range r.members {
		if over(rec.State) && (oldest == nil || rec.Since.Before(oldest.Since)) {
			oldest = rec
		}
	}
	if oldest == nil {
		return false
	}
	r.forget(oldest)
	return true
}

func (r *registry) beat(b *beat, now time.Time) (ask string) {
	rec := r.members[b.ID]
	if rec != nil && rec.refuses(b.Epoch) {
		rec.namesakeHeard = now
		return ""
	}
	if rec == nil || rec.Epoch < b.Epoch || rec.Epoch > b.Epoch && rec.yields(now) {
		if rec != nil && !over(rec.State) {
			r.end(rec, Dead, causeReplace, fmt.Sprintf("replaced by epoch %d", b.Epoch), now)
		}
		return r.unknown(b.ID, now)
	}
	rec.seen = now
	if rec.Epoch > b.Epoch {
		return r.twice(rec, b, now)
	}
	if !r.alive(rec, now) {
		return ""
	}
	rec.owes = false
	if rec.Role != b.Role || rec.Draining != b.Draining || rec.WaitOnly != b.WaitOnly {
		rec.Role, rec.Draining, rec.WaitOnly = b.Role, b.Draining, b.WaitOnly
		r.version++
	}
	rec.Load = b.Load
	return ""
}

// yields reports whether the member has ended and leaves its id to an older epoch, as when a
// second process was started by mistake with the id of a running one.
func (rec *record) yields(now time.Time) bool {
	return rec.Source == NATS && over(rec.State) && !rec.removed && !rec.Revoked && !now.Before(rec.deafUntil)
}

func (r *registry) unknown(id string, now time.Time) (ask string) {
	if last, ok := r.asked[id]; ok && now.Sub(last) < suspectAfter {
		return ""
	} else if !ok && len(r.asked) >= r.maxMembers {
		return ""
	}
	r.asked[id] = now
	return id
}

func (r *registry) bye(b *beat, now time.Time) {
	if rec := r.members[b.ID]; rec != nil && rec.Epoch == b.Epoch && rec.State != Gone {
		rec.seen, rec.deafUntil = now, now.Add(underWay)
		r.end(rec, Gone, causeBye, "said goodbye", now)
	}
}

// alive notes a sign of life and reports whether it counts: not if the member is gone, or if it
// may have been sent before the member's reported death.
func (r *registry) alive(rec *record, now time.Time) bool {
	if rec.State == Gone || now.Before(rec.deafUntil) {
		return false
	}
	rec.heard, rec.Heard, r.stale = r.witnessed, now, true
	if rec.State != Live {
		r.end(rec, Live, causeBack, "", now)
	}
	return true
}

// reportAlive is a sign of life from the data path.
func (r *registry) reportAlive(id string, epoch uint64, now time.Time) bool {
	rec := r.members[id]
	return rec != nil && rec.Epoch == epoch && !rec.owes && r.alive(rec, now)
}

// retired handles the end of a fleet secret. A member that announced no other is dead until it
// does. All others must be heard on NATS, which admits only secrets in force; probes prove
// nothing.
func (r *registry) retired(id string, now time.Time) {
	for _, rec := range r.members {
		if rec.Source != NATS || over(rec.State) {
			continue
		}
		rec.owes, rec.deafUntil = true, now.Add(underWay)
		if rec.Secrets == id {
			r.end(rec, Dead, causeRevoked, "the fleet secret that it has is retired", now)
		}
	}
}

// reportDead is a death seen by the data path. Signs of life are then ignored for a while,
// longer each time, so that neither messages under way nor a half-dead worker make it flap.
func (r *registry) reportDead(id string, epoch uint64, reason string, now time.Time) {
	rec := r.members[id]
	if rec == nil || rec.Epoch != epoch || over(rec.State) {
		return
	}
	if now.Sub(rec.deafUntil) > forgetAfter {
		rec.reports = 0
	}
	rec.deafUntil = now.Add(suspectAfter << min(rec.reports, maxDoublings))
	rec.reports++
	r.end(rec, Dead, causeReport, reason, now)
}

// left reports whether a reported death was a proper exit: the member was draining or said
// goodbye. A goodbye would come before an echo sent after the death, which settles it.
func (r *registry) left(e *event, reported, now time.Time) (left, settled bool) {
	rec := r.members[e.id]
	if e.draining || rec != nil && rec.Epoch == e.epoch && rec.State == Gone {
		return true, true
	}
	waits := rec != nil && rec.Source == NATS && r.link.Up && !r.proved.After(reported) && now.Sub(reported) < echoPatience
	return false, !waits
}

// remove ends a member for good: further messages of its epoch are ignored.
func (r *registry) remove(id, reason string, now time.Time) bool {
	rec := r.members[id]
	if rec == nil || rec.State == Gone {
		return false
	}
	rec.removed = true
	r.end(rec, Gone, causeRemove, reason, now)
	return true
}

// echo proves that the link worked at the time sent.
func (r *registry) echo(sent time.Time) {
	if sent.After(r.proved) {
		r.witnessed += min(sent.Sub(r.proved), echoStep)
		r.proved = sent
	}
}

// setLink notes that the link went up or down. When it comes up, all members count as just
// heard, and silence is not judged for the grace time.
func (r *registry) setLink(l Link, now time.Time) {
	if l.Up {
		r.judgeFrom = now.Add(r.grace)
		r.proved = now
		for _, rec := range r.members {
			rec.heard = r.witnessed
		}
	}
	r.link = l
	r.version++
}

// tick judges silence and forgets.
func (r *registry) tick(now time.Time) {
	judge := r.link.Up && !now.Before(r.judgeFrom)
	for _, rec := range r.members {
		if rec.Namesake != "" && now.Sub(rec.namesakeHeard) > deadAfter { // rec.namesake stays refused
			rec.Namesake = ""
			r.version++
		}
		if over(rec.State) {
			if (rec.Source == NATS || rec.State == Gone) && now.Sub(later(rec.Since, rec.seen)) > forgetAfter {
				r.forget(rec)
			}
			continue
		}
		if judge && rec.Source == NATS {
			r.judge(rec, now)
		}
	}
	for id, at := range r.asked {
		if now.Sub(at) > deadAfter {
			delete(r.asked, id)
		}
	}
}

// judge judges a member's silence. An answered probe counts until the next one is overdue.
func (r *registry) judge(rec *record, now time.Time) {
	unheard, silent, allowed := r.witnessed-rec.heard, r.witnessed-rec.heard, suspectAfter
	if rec.proof > rec.heard && !rec.owes {
		silent, allowed = r.witnessed-rec.proof, suspectAfter+answerTime
	}
	state, reason := rec.State, fmt.Sprintf("silent for %.1f s", silent.Seconds())
	switch {
	case silent > deadAfter:
		state = Dead
	case silent > allowed:
		state = Suspect
	case unheard > suspectAfter:
		state, reason = Unheard, "NATS does not hear it, its HTTP answers"
	}
	if state != rec.State {
		r.end(rec, state, causeSilence, reason, now)
	}
}

// doubt is a member to be probed.
type doubt struct {
	inst Instance
	at   time.Duration // witnessed clock
}

// doubts returns at most n members to probe: those about to be suspected, and those that live
// on probes. Each is probed at most once in suspectAfter.
func (r *registry) doubts(now time.Time, n int) (out []doubt) {
	if !r.link.Up {
		return nil
	}
	for _, rec := range r.members {
		if len(out) == n {
			break
		}
		if rec.Source != NATS || over(rec.State) || rec.probing || now.Sub(rec.probed) < suspectAfter || r.witnessed-rec.heard <= suspectAfter/2 {
			continue
		}
		rec.probing, rec.probed = true, now
		out = append(out, doubt{rec.Instance, r.witnessed})
	}
	return out
}

// settle notes the result of a probe.
func (r *registry) settle(d *doubt, answered bool, now time.Time) {
	rec := r.members[d.inst.ID]
	if rec == nil || rec.Epoch != d.inst.Epoch {
		return
	}
	if rec.probing = false; answered && !over(rec.State) {
		rec.proof, rec.Heard, r.stale = d.at, now, true
	}
}

func (r *registry) end(rec *record, s State, cause, reason string, now time.Time) {
	since, lapses := now, rec.State == Suspect || rec.State == Unheard
	switch {
	case rec.State == Live:
		rec.lived = rec.Since
	case lapses && s == Live:
		since = rec.lived
		rec.Lapses, rec.Lapsed = rec.Lapses+1, now
	}
	rec.State, rec.Since, rec.Reason = s, since, reason
	r.version++
	r.note(rec, cause, reason)
}

func (r *registry) forget(rec *record) {
	delete(r.members, rec.ID)
	r.version++
	r.note(rec, causeForget, "")
}

func (r *registry) note(rec *record, cause, reason string) {
	r.events = append(r.events, event{id: rec.ID, role: rec.Role, epoch: rec.Epoch, state: rec.State,
		cause: cause, reason: reason, draining: rec.Draining})
}

func (r *registry) snapshot(now time.Time) *Snapshot {
	members := make([]Member, 0, len(r.members))
	for _, rec := range r.members {
		members = append(members, rec.Member)
	}
	s := NewSnapshot(r.version, now, members)
	s.Link, s.Revoked = r.link, r.revoked.shutOut()
	r.stale = false
	return s
}

func over(s State) bool { return s == Dead || s == Gone }

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
