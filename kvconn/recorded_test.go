package kvconn

import (
	"bytes"
	"encoding/hex"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestRecordedFrames: every frame that a released version has written reads
// and writes again to the same bytes under that version.
func TestRecordedFrames(t *testing.T) {
	paths, err := filepath.Glob("testdata/v*/*.txt")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no recordings: %v", err)
	}
	seen := map[frameType]bool{}
	for _, path := range paths {
		version, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(filepath.Dir(path)), "v"))
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for n, line := range strings.Split(strings.TrimSuffix(string(text), "\n"), "\n") {
			b, err := hex.DecodeString(line[strings.LastIndexByte(line, ' ')+1:])
			if err != nil {
				t.Fatalf("%s:%d: %v", path, n+1, err)
			}
			if bytes.HasPrefix(b, []byte(bannerName)) {
				if lo, hi, ok := parseBanner(b); !ok || string(b) != bannerName+bannerRange(lo, hi)+"\n" {
					t.Errorf("%s:%d: banner %q", path, n+1, b)
				}
				continue
			}
			seen[frameType(b[1])] = true
			if again, err := rewrite(b, uint8(version)); err != nil || !bytes.Equal(again, b) {
				t.Errorf("%s:%d: %v\n%x became\n%x", path, n+1, err, b, again)
			}
		}
	}
	for _, typ := range []frameType{typeHello, typeRefuse, typeReady, typeBind, typeBound, typeTicket, typeRevoke, typeResend, typeReceived,
		typePing, typeAccepted, typeCommit, typeFailed, typeRevokeAck, typePong, typeGoaway, typeUnit, typeSent, typeBeat, typeBatch} {
		if !seen[typ] {
			t.Errorf("no frame of type %d was recorded", typ)
		}
	}
}

// rewrite reads one frame as a connection does, and encodes what it has read.
func rewrite(b []byte, version uint8) ([]byte, error) {
	r := newFrameConn(&stubConn{r: bytes.NewReader(b)}, 1<<16)
	r.version, r.maxUnit = version, 1<<16
	r.ordered = false // each frame is read on its own
	typ, body, err := r.next()
	if err != nil {
		return nil, err
	}
	w := beginFrame(nil, version, typ)
	switch {
	case len(body) == 0:
		w = encode(w, bare(typ))
	case typ == typeUnit:
		u, sums, rows, err := decodeUnit(body, nil)
		if err != nil {
			return nil, err
		}
		w = encode(w, &u)
		for _, s := range sums {
			w = putU64(w, s)
		}
		rest, err := r.takeRows(r.rest)
		if err != nil {
			return nil, err
		}
		w = append(append(w, rows...), rest...)
	case typ == typeBatch:
		list, sums, err := decodeArrivals(typeBatch, body, r.rest, nil, nil)
		if err != nil {
			return nil, err
		}
		w = encode(w, &batchHead{list[0].Ticket, list[0].Tag, uint32(len(list)), uint32(len(sums))})
		for i := range list {
			w = appendEntry(w, &list[i].unitHead, list[i].bytes)
		}
		for _, s := range sums {
			w = putU64(w, s)
		}
		rows, err := r.takeRows(r.rest)
		if err != nil {
			return nil, err
		}
		w = append(w, rows...)
	default:
		m, err := decodeAny(typ, body)
		if err != nil {
			return nil, err
		}
		w = encode(w, m)
	}
	endFrame(w, 0, r.in-1)
	return w, nil
}
