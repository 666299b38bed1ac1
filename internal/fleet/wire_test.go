package fleet

import (
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestValidID(t *testing.T) {
	for id, ok := range map[string]bool{
		"prefill-0": true, "a": true, "a.b_C-9": true, strings.Repeat("x", 64): true,
		"": false, strings.Repeat("x", 65): false, ".a": false, "a.": false, "a..b": false,
		"a b": false, "a*": false, "a>": false, "ä": false, "a/b": false,
	} {
		if err := ValidID(id); (err == nil) != ok {
			t.Errorf("%q: %v", id, err)
		}
	}
}

func TestValidate(t *testing.T) {
	f := func(want string, change func(*Instance)) {
		t.Helper()
		i := *worker("a", 1)
		i.KVAddr, i.ProtocolMin, i.ProtocolMax = "127.0.0.1:9", 1, 2
		change(&i)
		err := i.Validate()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	f("", func(*Instance) {})
	f("role", func(i *Instance) { i.Role = "both" })
	f("url", func(i *Instance) { i.URL = "ftp://x:1" })
	f("url", func(i *Instance) { i.URL = "http://u:p@x:1" })
	f("kv_addr", func(i *Instance) { i.KVAddr = "nowhere" })
	f("kv_addr", func(i *Instance) { i.KVAddr = "host:70000" })
	f("", func(i *Instance) { i.KVWays = map[string]string{"near": "near:x", "far-2": "far-2:10.0.0.1:9"} })
	f("kv_ways", func(i *Instance) { i.KVWays = map[string]string{"near": ""} })
	f("kv_ways", func(i *Instance) { i.KVWays = map[string]string{"near": "near:\n"} })
	f("kv_ways", func(i *Instance) { i.KVWays = map[string]string{"near": strings.Repeat("x", 513)} })
	f("kv_ways", func(i *Instance) { i.KVWays = map[string]string{"a b": "x"} })
	f("kv_ways", func(i *Instance) {
		i.KVWays = map[string]string{}
		for n := range maxWays + 1 {
			i.KVWays[strings.Repeat("w", n+1)] = "x"
		}
	})
	f("", func(i *Instance) {
		i.Devices = slices.Repeat([]Device{{Name: "cuda:0", UUID: "GPU-1", PCI: "0000:17:00.0", Model: "A"}}, maxDevices)
	})
	f("devices: 17", func(i *Instance) { i.Devices = make([]Device, maxDevices+1) })
	f("devices.name", func(i *Instance) { i.Devices = []Device{{}, {Name: "a\nb"}} })
	f("devices.uuid", func(i *Instance) { i.Devices = []Device{{UUID: strings.Repeat("u", 513)}} })
	f("devices.model", func(i *Instance) { i.Devices = []Device{{Model: "\xff"}} })
	f("model", func(i *Instance) { i.Model = strings.Repeat("m", 513) })
	f("build", func(i *Instance) { i.Build = "a\x1b[2J" })
	f("numerics", func(i *Instance) { i.Numerics = "\xff" })
	f("blocks", func(i *Instance) { i.Blocks = -1 })
	f("protocol", func(i *Instance) { i.ProtocolMin = 3 })
	f("kv_used", func(i *Instance) { i.Load.KVUsed = 1.5 })
	f("kv_used", func(i *Instance) { i.Load.KVUsed = math.NaN() })
	f("load", func(i *Instance) { i.Load.Waiting = -1 })
}

func TestDecodeRefuses(t *testing.T) {
	inst, err := json.Marshal(worker("a", 1))
	if err != nil {
		t.Fatal(err)
	}
	if m, err := decode(subjectAnnounce+"a", []byte(strings.Repeat(" ", 16<<10-len(inst))+string(inst))); err != nil || m.kind != kindAnnounce {
		t.Errorf("16 KiB: %v", err)
	}
	for name, c := range map[string]struct{ subject, payload string }{
		"foreign id":    {subjectAnnounce + "b", string(inst)},
		"unknown":       {"xpyd.fleet.other", "{}"},
		"too long":      {subjectAnnounce + "a", strings.Repeat(" ", maxMessageBytes) + string(inst)},
		"no epoch":      {subjectHeartbeat + "a", `{"id":"a","role":"decode"}`},
		"foreign beat":  {subjectHeartbeat + "b", `{"id":"a","epoch":1,"role":"decode"}`},
		"no number":     {subjectHeartbeat + "a", `{"id":"a","epoch":1,"role":"decode","draining":3}`},
		"bad load":      {subjectHeartbeat + "a", `{"id":"a","epoch":1,"role":"decode","load":{"waiting":-1}}`},
		"bad share":     {subjectHeartbeat + "a", `{"id":"a","epoch":1,"role":"decode","load":{"kv_used":2}}`},
		"bad role":      {subjectBye + "a", `{"id":"a","epoch":1,"role":"x"}`},
		"negative echo": {subjectEcho + "t", "-1"},
		"no echo":       {subjectEcho + "t", ""},
		"no json":       {subjectReply + "t", "x"},
	} {
		if m, err := decode(c.subject, []byte(c.payload)); err == nil || !reflect.DeepEqual(m, message{}) {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
	}
}

// FuzzDecode: nothing panics, what is refused yields nothing, and what is
// accepted is accepted again after encoding, unchanged.
func FuzzDecode(f *testing.F) {
	inst, err := json.Marshal(worker("a.b", 1<<53))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(subjectAnnounce+"a.b", inst)
	f.Add(subjectReply+"t", inst)
	f.Add(subjectReply+"t", []byte(`{"id":"a","epoch":1,"role":"decode","url":"http://h:1","kv_ways":{}}`))
	f.Add(subjectReply+"t", []byte(`{"id":"a","epoch":1,"role":"decode","url":"http://h:1","kv_ways":{"near":"near:x"}}`))
	f.Add(subjectReply+"t", []byte(`{"id":"a","epoch":1,"role":"decode","url":"http://h:1","devices":[]}`))
	f.Add(subjectReply+"t", []byte(`{"id":"a","epoch":1,"role":"decode","url":"http://h:1","devices":[{"name":"cuda:0","uuid":"GPU-1"}]}`))
	f.Add(subjectHeartbeat+"a", []byte(`{"id":"a","epoch":1,"role":"decode","load":{"kv_used":0.5}}`))
	f.Add(subjectBye+"a", []byte(`{"id":"a","epoch":1,"role":"prefill"}`))
	f.Add(subjectEcho+"t", []byte("123"))
	f.Add(subjectRevoked, []byte(`{"revoked":[{"id":"a","at":5},{"id":"b","at":7,"back":true}]}`))
	f.Fuzz(func(t *testing.T, subject string, payload []byte) {
		m, err := decode(subject, payload)
		if err != nil {
			if !reflect.DeepEqual(m, message{}) {
				t.Fatalf("refused but returned %+v", m)
			}
			return
		}
		var again []byte
		switch m.kind {
		case kindAnnounce:
			again, err = json.Marshal(m.inst)
		case kindEcho:
			again = encodeEcho(m.echo)
		case kindRevoked:
			again, err = json.Marshal(revokedMessage{m.revoked})
		default:
			again, err = json.Marshal(m.beat)
		}
		if err != nil {
			t.Fatal(err)
		}
		if n, err := decode(subject, again); err != nil || !reflect.DeepEqual(n, m) {
			t.Fatalf("%+v, then %+v, %v", m, n, err)
		}
	})
}
