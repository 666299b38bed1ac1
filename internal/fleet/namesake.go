package fleet

import (
	"fmt"
	"time"
)

// twice notes that a process of an older epoch still beats although a younger one has its id. What
// was under way when that came, or is about to leave, is no such process. The older one has its id
// back if it never stopped beating: the younger one was started with that id by mistake. One that was
// frozen or cut off has not.
func (r *registry) twice(rec *record, b *beat, now time.Time) (ask string) {
	if rec.Source != NATS || over(rec.State) || b.Draining {
		return ""
	}
	replaced := rec.before != nil && rec.before.Epoch == b.Epoch
	if replaced {
		rec.claims = rec.claims && now.Sub(rec.heardOld) <= suspectAfter
		rec.heardOld = now
	}
	if now.Sub(rec.came) <= suspectAfter {
		return ""
	}
	if rec.namesakeHeard = now; rec.namesake == b.Epoch {
		return ""
	}
	used, namesake, epoch := rec, string(b.Role)+" of an older start", b.Epoch
	if replaced {
		namesake = rec.before.place()
	}
	if replaced && rec.claims {
		used = &record{Member: Member{Instance: *rec.before, State: Live, Since: now, Source: NATS}, seen: now, came: now}
		r.members[b.ID] = used
		r.alive(used, now)
		namesake, epoch, ask = rec.place(), rec.Epoch, r.unknown(b.ID, now) // what it announced meanwhile
	}
	used.namesake, used.Namesake, used.namesakeHeard = epoch, namesake, now
	r.version++
	r.note(used, causeTwice, fmt.Sprintf("two processes have this id: %s, which is used, and %s, which is not; give one of them another --id", used.place(), namesake))
	return ask
}

// refuses reports whether an epoch is that of a younger process which has the member's id by mistake.
func (rec *record) refuses(epoch uint64) bool {
	return rec.Source == NATS && rec.namesake == epoch && epoch > rec.Epoch && !over(rec.State)
}

// place says which process it is.
func (i *Instance) place() string { return fmt.Sprintf("%s at %s, pid %d", i.Role, i.URL, i.PID) }
