package kvevents_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/kvevents"
)

// golden is a batch as an engine's own structures encode it; scripts/zmq-interop
// makes them anew.
func golden(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name + ".hex")
	if err != nil {
		t.Fatal(err)
	}
	b, err := hex.DecodeString(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var names = []string{"vllm-arrays", "vllm-arrays-bytes", "vllm-maps", "sglang-arrays"}

func TestGolden(t *testing.T) {
	const lastOfBytes = 0x18191a1b1c1d1e1f // 24, 25, … 31
	minus := func(n int64) uint64 { return uint64(-n) }
	for name, want := range map[string]*kvevents.Batch{
		"vllm-arrays": {Time: 1.5, Events: []kvevents.Event{
			{Hashes: []uint64{11, 22}, Tokens: []uint32{1, 2, 3, 4}, BlockSize: 2},
			{Hashes: []uint64{33}, Parent: 22, HasParent: true, Tokens: []uint32{5, 70000}, BlockSize: 2, LoRA: "ada", Tier: kvevents.Host},
			{Kind: kvevents.Removed, Hashes: []uint64{11}},
			{Kind: kvevents.Cleared},
		}},
		"vllm-arrays-bytes": {Time: 1.5, Rank: 1, Events: []kvevents.Event{
			{Hashes: []uint64{lastOfBytes}, Parent: lastOfBytes + 0x0101010101010101, HasParent: true, Tokens: []uint32{1, 2}, BlockSize: 2,
				Extra: []uint64{kvevents.SaltExtra("salt")}},
		}},
		"vllm-maps": {Time: 1.5, Rank: 7, Events: []kvevents.Event{
			{Hashes: []uint64{11, 22}, Tokens: []uint32{1, 2, 3, 4}, BlockSize: 2},
			{Hashes: []uint64{99}, Tokens: []uint32{1, 2}, BlockSize: 2, Group: 1, Window: true},
			{Kind: kvevents.Removed, Hashes: []uint64{1<<64 - 1}, Tier: kvevents.Disk, Group: 1},
			{Kind: kvevents.Cleared},
		}},
		"sglang-arrays": {Time: 2.25, Events: []kvevents.Event{
			{Hashes: []uint64{minus(5)}, Tokens: []uint32{7}, BlockSize: 1},
			{Hashes: []uint64{minus(6)}, Parent: minus(5), HasParent: true, Tokens: []uint32{8}, BlockSize: 1, Tier: kvevents.Host,
				Extra: []uint64{kvevents.ExtraOf([]byte("\x81\xa9extra_key\xa1s"))}},
			{Kind: kvevents.Removed, Hashes: []uint64{minus(5)}, Tier: kvevents.Disk},
			{Kind: kvevents.Removed, Hashes: []uint64{minus(6)}},
			{Kind: kvevents.Cleared},
		}},
	} {
		got, err := kvevents.Decode(golden(t, name))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v\n got %+v\nwant %+v", name, err, got, want)
		}
	}
}

// TestUnknown: what later versions may add is passed over.
func TestUnknown(t *testing.T) {
	const future = "\x94\x01\x92" + // a batch with a fourth field
		"\x82\xa4type\xabBlockPinned\xa1x\x81\x01\xc4\x02ab" + // an unknown event
		"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\x05\xa3new\x92\xc0\xd4\x01z" +
		"\x03\xcb\x00\x00\x00\x00\x00\x00\x00\x00"
	got, err := kvevents.Decode([]byte(future))
	want := &kvevents.Batch{Time: 1, Rank: 3, Unknown: 1, Events: []kvevents.Event{{Kind: kvevents.Removed, Hashes: []uint64{5}}}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, %+v", err, got)
	}
}

func TestMalformed(t *testing.T) {
	for name, text := range map[string]string{
		"empty":            "",
		"no list":          "\xa1x",
		"short batch":      "\x91\x01",
		"bad byte":         "\x92\x01\x91\xc1",
		"huge list":        "\x92\x01\xdd\xff\xff\xff\xff",
		"huge text":        "\x92\x01\x91\x91\xdb\xff\xff\xff\xffx",
		"no type":          "\x92\x01\x91\x80",
		"empty event":      "\x92\x01\x91\x90",
		"stored, no more":  "\x92\x01\x91\x91\xabBlockStored",
		"removed, no more": "\x92\x01\x91\x91\xacBlockRemoved",
		"tokens missing":   "\x92\x01\x91\x95\xabBlockStored\x91\x01\xc0\x91\x01\x02",
		"negative token":   "\x92\x01\x91\x95\xabBlockStored\x91\x01\xc0\x91\xff\x01",
		"empty hash":       "\x92\x01\x91\x92\xacBlockRemoved\x91\xa0",
		"trailing":         "\x92\x01\x90\x01",
		"rank":             "\x93\x01\x90\xce\xff\xff\xff\xff",
	} {
		if b, err := kvevents.Decode([]byte(text)); !errors.Is(err, kvevents.ErrMalformed) || b != nil {
			t.Errorf("%s: %+v, %v", name, b, err)
		}
	}
}

// FuzzDecode: no input panics or takes memory out of proportion, and what is
// understood is written and read again the same.
func FuzzDecode(f *testing.F) {
	for _, name := range names {
		f.Add(golden(f, name))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		batch, err := kvevents.Decode(b)
		if err != nil {
			return
		}
		batch.Unknown = 0
		for i := range batch.Events { // what is only known as a hash is not written
			batch.Events[i].Extra, batch.Events[i].Window = nil, false
		}
		wire := kvevents.Append(nil, batch)
		again, err := kvevents.Decode(wire)
		if err != nil {
			t.Fatalf("%v of our own %x", err, wire)
		}
		if twice := kvevents.Append(nil, again); !bytes.Equal(wire, twice) {
			t.Fatalf("%x, then %x", wire, twice)
		}
		if _, err := kvevents.Decode(kvevents.AppendArrays(nil, batch)); err != nil {
			t.Fatal(err)
		}
	})
}

// TestCopied: what an offloading engine tells of a copy, which has no tokens, is
// read; of blocks on the device there must be some.
func TestCopied(t *testing.T) {
	for _, encode := range []func([]byte, *kvevents.Batch) []byte{kvevents.Append, kvevents.AppendArrays} {
		in := &kvevents.Batch{Events: []kvevents.Event{{Hashes: []uint64{1, 2}, Tier: kvevents.Host}, {Hashes: []uint64{3}, Tier: kvevents.Disk, BlockSize: 16}}}
		got, err := kvevents.Decode(encode(nil, in))
		if err != nil || len(got.Events) != 2 || got.Events[0].Tier != kvevents.Host || len(got.Events[0].Hashes) != 2 || len(got.Events[1].Tokens) != 0 {
			t.Errorf("%+v: %v", got, err)
		}
		in.Events[0].Tier = kvevents.GPU
		if _, err := kvevents.Decode(encode(nil, in)); err == nil {
			t.Error("blocks of no tokens on the device")
		}
	}
}

// TestDeep: nesting costs a hostile publisher's reader little, and is bounded.
func TestDeep(t *testing.T) {
	f := func(levels int) error {
		_, err := kvevents.Decode([]byte("\x92\x01\x91\x92\xa1x" + strings.Repeat("\x91", levels) + "\xc0"))
		return err
	}
	if err := f(10_000); err != nil {
		t.Error(err)
	}
	if err := f(10_000_000); !errors.Is(err, kvevents.ErrMalformed) {
		t.Errorf("%v", err)
	}
}
