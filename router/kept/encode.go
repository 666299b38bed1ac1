package kept

import "encoding/json"

// value is an entry in the Redis. It says which version it is of, as routers of two may share it.
type value struct {
	Version  int             `json:"v"`
	Owner    string          `json:"owner"`
	Before   []string        `json:"before,omitempty"`
	Input    json.RawMessage `json:"input"`
	Response json.RawMessage `json:"response"`
	Until    int64           `json:"until,omitempty"`
}

const version = 1

func (e *Entry) encode() ([]byte, error) {
	return json.Marshal(value{version, e.Owner, e.Before, e.Input, e.Response, e.Until})
}

// decode reads a value; nil if it is none of ours.
func decode(b []byte) *Entry {
	var v value
	if json.Unmarshal(b, &v) != nil || v.Version != version || len(v.Before) > MaxChain || len(v.Input) == 0 || len(v.Response) == 0 ||
		v.Input[0] != '"' && v.Input[0] != '[' || v.Response[0] != '{' {
		return nil
	}
	return &Entry{v.Owner, v.Before, v.Input, v.Response, v.Until}
}
