package kvconn

import (
	"testing"
)

func TestFence(t *testing.T) {
	settled := 0
	f := newFence(func() { settled++ })
	for range 2 {
		if !f.enter() {
			t.Fatal("an open fence lets in")
		}
	}
	f.shut()
	f.shut()
	if f.enter() {
		t.Error("a shut fence let in")
	}
	f.leave()
	select {
	case <-f.quiet:
		t.Error("quiet with one inside")
	default:
	}
	f.leave()
	<-f.quiet
	if settled != 1 {
		t.Errorf("settled %d times", settled)
	}
	g := newFence(nil)
	g.shut()
	<-g.quiet
}
