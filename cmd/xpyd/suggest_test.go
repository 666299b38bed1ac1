package main

import (
	"strings"
	"testing"
)

// TestDidYouMean: a slip of the hand gets a hint, and anything else none.
func TestDidYouMean(t *testing.T) {
	for line, want := range map[string]string{
		"statsu":                       `unknown command "statsu" (did you mean status?)`,
		"chta --raw hi":                "(did you mean chat?)",
		"Status":                       `(did you mean status?)`,
		"tra":                          `(did you mean trace?)`,
		"serve":                        "",
		"zz":                           "",
		"up --prefil 2":                "unknown flag: --prefil (did you mean --prefill?)",
		"up --modell x":                "unknown flag: --modell (did you mean --model?)",
		"router --tensor-parallell=2":  "",
		"bench --concurrencyy 3":       "(did you mean --concurrency?)",
		"bench --something-of-mine":    "",
		"status --waatch":              "(did you mean --watch?)",
		"status --watch=perhaps":       "",
		"bench kvios":                  `xpyd bench: unknown command "kvios" (did you mean kvio?)`,
		"bench compair a b":            "(did you mean compare?)",
		"keys lits":                    "(did you mean list?)",
		"secret rotat":                 "(did you mean rotate?)",
		"keys everything":              "",
		"bench kv --hlep":              "(did you mean --help?)",
		"prefill --tensor-parallell=2": "(did you mean --tensor-parallel?)",
	} {
		_, errs, code := xpyd(t, strings.Fields(line)...)
		if has := strings.Contains(errs, "did you mean"); code != exitUsage || has != (want != "") || !strings.Contains(errs, want) {
			t.Errorf("%s: %d %q", line, code, errs)
		}
	}
}
