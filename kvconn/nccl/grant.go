package nccl

import (
	"encoding/binary"
	"fmt"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn/stage"
)

const grantForm = 5 // of stage.Grant: 1 is cudaipc's, 2 pinned's, 3 and 4 moved less to begin with

// grant describes the link: a stage.Grant, then a length (u32) and the link's name.
type grant struct {
	stage.Grant
	id []byte
}

func (g *grant) encode() []byte {
	b := binary.LittleEndian.AppendUint32(g.Encode(), uint32(len(g.id)))
	return append(b, g.id...)
}

// decodeGrant accepts exactly what encode writes, and nothing out of bounds.
func decodeGrant(b []byte) (*grant, error) {
	g, rest, err := stage.DecodeGrant(b, grantForm)
	if err != nil {
		return nil, fmt.Errorf("nccl: %w", err)
	}
	if len(rest) < 5 || len(rest) > 4+kernels.MaxHandle || int(binary.LittleEndian.Uint32(rest)) != len(rest)-4 {
		return nil, fmt.Errorf("nccl: %w: a name in %d bytes", stage.ErrGrant, len(rest))
	}
	return &grant{g, append([]byte(nil), rest[4:]...)}, nil
}
