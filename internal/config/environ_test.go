package config_test

import (
	"reflect"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/config"
)

// TestEnviron: what differs, and no more, comes out as variables, secrets as they are, and
// Load makes the same of them.
func TestEnviron(t *testing.T) {
	type inner struct {
		Size config.Size   `key:"size"`
		Wait time.Duration `key:"wait"`
		URL  string        `key:"url" secret:"url"`
	}
	type outer struct {
		Name   string   `key:"name"`
		On     bool     `key:"on"`
		Share  float64  `key:"share"`
		Inner  inner    `key:"inner_part"`
		Hosts  []string `key:"hosts"`
		Unsaid string
	}
	from := outer{Name: "n", On: true, Inner: inner{Size: 1 << 20}}
	to := outer{Name: "m=x", Share: 0.225, Inner: inner{Size: 1 << 20, Wait: time.Second, URL: "redis://:secret@h"}, Unsaid: "x"}
	vars, err := config.Environ(&from, &to)
	want := []string{"XPYD_NAME=m=x", "XPYD_ON=false", "XPYD_SHARE=0.225", "XPYD_INNER_PART__WAIT=1s", "XPYD_INNER_PART__URL=redis://:secret@h"}
	if err != nil || !reflect.DeepEqual(vars, want) {
		t.Errorf("%v, %q, want %q", err, vars, want)
	}
	got, wanted := from, to
	wanted.Unsaid = ""
	if err := config.Load(&got, config.Options{Environ: vars}); err != nil || !reflect.DeepEqual(got, wanted) {
		t.Errorf("%v: loaded %+v, want %+v", err, got, wanted)
	}
	if vars, err := config.Environ(&from, &from); err != nil || len(vars) > 0 {
		t.Errorf("nothing differs: %v, %q", err, vars)
	}
	to.Hosts = []string{"h"}
	if _, err := config.Environ(&from, &to); err == nil {
		t.Error("a list is handed on")
	}
}
