package model_test

import (
	"encoding/binary"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/model"
)

func safetensors(header string, body int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), make([]byte, body)...)
}

func TestParseSafetensors(t *testing.T) {
	f := func(want, header string, body int) {
		t.Helper()
		got, err := model.ParseSafetensors(safetensors(header, body))
		switch {
		case want == "" && err != nil:
			t.Errorf("%s: %v", header, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%s: error %v, want one with %q", header, err, want)
		case want != "" && len(got) > 0:
			t.Errorf("%s: tensors and an error", header)
		}
	}
	const a = `"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}`
	f("", `{`+a+`}`, 8)
	f("", `{`+a+`}   `, 8)
	f("", `{"__metadata__":{"format":"pt"},`+a+`,"z":{"dtype":"F32","shape":[0,4],"data_offsets":[8,8]}}`, 8)
	f("", `{"b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]},`+a+`}`, 10)
	f("", `{"i":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}`, 8)
	f("unexpected EOF", `{`+a, 8)
	f("does not begin", ` {`+a+`}`, 8)
	f("text after", `{`+a+`}x`, 8)
	f("twice", `{`+a+`,`+a+`}`, 8)
	f("cover 8 of 9", `{`+a+`}`, 9)
	f("a: data_offsets", `{`+a+`}`, 7)
	f("tensor b begins at 4", `{`+a+`,"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}`, 8)
	f("tensor a begins at 4", `{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}`, 8)
	f("does not fill", `{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}`, 8)
	f("does not fill", `{"a":{"dtype":"F32","shape":[4611686018427387906,4],"data_offsets":[0,8]}}`, 8)
	f("data_offsets", `{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}`, 8)
	f("data_offsets", `{"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}}`, 8)
	f("a: ", `{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}`, 8)
	f("shape", `{"a":{"dtype":"F32","data_offsets":[0,4]}}`, 4)
	f("dtype", `{"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}`, 8)
	f("__metadata__", `{"__metadata__":3}`, 0)

	for _, b := range [][]byte{nil, {1, 2}, binary.LittleEndian.AppendUint64(nil, 1<<63), binary.LittleEndian.AppendUint64(nil, 0), binary.LittleEndian.AppendUint64(nil, 100_000_001)} {
		if _, err := model.ParseSafetensors(b); err == nil {
			t.Errorf("%v: no error", b)
		}
	}
}

func TestParseIndex(t *testing.T) {
	f := func(want, text string) {
		t.Helper()
		if _, err := model.ParseIndex([]byte(text)); (want == "") != (err == nil) || (err != nil && !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: error %v, want %q", text, err, want)
		}
	}
	f("", `{"metadata":{"total_size":8},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}}`)
	f("missing or empty", `{}`)
	f("missing or empty", `{"weight_map":{}}`)
	f("weight_map: a: file name", `{"weight_map":{"a":"/etc/x.safetensors"}}`)
	f("file name", `{"weight_map":{"a":"..\\x.safetensors"}}`)
	f("file name", `{"weight_map":{"a":".hidden.safetensors"}}`)
	f("file name", `{"weight_map":{"a":"pytorch_model.bin"}}`)
	f("weight_map", `{"weight_map":[1]}`)
	f("twice", `{"weight_map":{"a":"m.safetensors","a":"n.safetensors"}}`)
}
