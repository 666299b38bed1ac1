package grammar

func (g *builder) jsonSchema(text string, space Whitespace) (*expr, error) {
	return nil, &Error{Reason: "x"}
}
